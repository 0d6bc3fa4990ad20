"""The ModelRunner protocol, and the choice of a runner for a checkpoint.

There are two runners: ``hf`` runs the unmodified Hugging Face module of any causal LM; ``lean`` is a fused forward pass for the
Llama family. Both are built from the configuration only; weights are views into a buffer that the caller fills. With adapters
both hold the frozen weights themselves, and only the adapters are bound.

Shapes: R sequences, Q new tokens of each, N tokens they may attend to, K tokens whose next-token logits are wanted, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from corrente.config import Lora
from corrente.data.routing import Experts
from corrente.engine.embedded.kv import KVView
from corrente.errors import ConfigError
from corrente.models import pretrained
from corrente.models.limits import DEFAULT_CONTEXT, max_positions
from corrente.sync.layout import Layout

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class ModelRunner(Protocol):
    """Contract: one forward pass for prefill and decoding, with no state but the bound weights."""

    def layout(self) -> Layout:
        """The layout in which this runner takes its weights."""
        ...

    def bind_weights(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Use these views, by slab name, from now on; nothing is copied."""
        ...

    def forward(
        self, ids_RQ: torch.Tensor, positions_RQ: torch.Tensor, mask_R1QN: torch.Tensor, kv: KVView, keep: torch.Tensor
    ) -> torch.Tensor:
        """Next-token logits (K, V) of the tokens at flat indices ``keep`` (K,) of (R, Q); the mask is additive."""
        ...

    def routing_shape(self) -> tuple[int, int] | None:
        """(layers, choices) of the experts of one token; None where they are not recorded."""
        ...

    def recorded_experts(self) -> Experts:
        """Experts (R x Q, layers, choices) of the latest forward pass. Only where ``routing_shape`` is not None."""
        ...


def read_model_config(path: Path, *, trust_remote_code: bool = False) -> PretrainedConfig:
    """The model's configuration; ConfigError when the directory holds none, or one this engine cannot serve."""
    if not (path / "config.json").is_file():
        raise ConfigError(
            f"model.path: {str(path)!r} holds no config.json; give a directory with a Hugging Face causal LM"
        )
    pretrained.verify_code(path, kind="AutoModelForCausalLM", trust_remote_code=trust_remote_code)
    try:
        config = pretrained.load(AutoConfig, path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path: {str(path)!r} has no configuration that can be loaded: {error}") from error
    reason = unsupported_reason(config, trust_remote_code=trust_remote_code)
    if reason:
        raise ConfigError(f"model.path: {str(path)!r} ({config.model_type}) cannot be served: {reason}")
    return config


def unsupported_reason(config: PretrainedConfig, *, trust_remote_code: bool = False) -> str:
    """Why a slot cache of keys and values cannot serve this architecture; empty when it can."""
    if config.is_encoder_decoder:
        return "it is an encoder-decoder"
    module = pretrained.model_class(AutoModelForCausalLM, config, trust_remote_code=trust_remote_code)
    if module is None:
        return "transformers knows no causal LM for it"
    if config.model_type in ("bloom", "mpt") or getattr(config, "alibi", False):
        return "its ALiBi positions are derived from a padding mask, not from position ids"
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention", "attention"}
    if kinds:
        return f"layers of type {', '.join(sorted(kinds))} keep a state that is not keys and values"
    if "local" in (getattr(config, "attention_layers", None) or ()):
        return "its local attention counts cache slots, not positions"
    if getattr(config, "num_kv_shared_layers", 0):
        return "some of its layers share keys and values"
    if getattr(module, "_is_stateful", False):
        return "it keeps a recurrent state"
    if "position_ids" not in inspect.signature(module.forward).parameters:
        return "its forward pass takes no position_ids"
    return ""


def context_limit(config: PretrainedConfig, wanted: int) -> int:
    """The number of tokens of prompt and completion together; ConfigError when ``wanted`` is more than the model allows."""
    limit = max_positions(config.get_text_config().to_dict(), windowed=True) or DEFAULT_CONTEXT
    if wanted > limit:
        raise ConfigError(f"engine.max_context: {wanted} given, but the model allows at most {limit}")
    return wanted or min(limit, DEFAULT_CONTEXT)


def build_model_runner(
    config: PretrainedConfig,
    *,
    path: str,
    dtype: torch.dtype,
    device: torch.device,
    context: int,
    source: Path,
    adapters: Lora | None = None,
    keep_routing: bool | None = False,
    trust_remote_code: bool = False,
) -> ModelRunner:
    """Build model path called ``path``; ``auto`` is lean where it applies. With ``adapters``, the weights of the model in
    ``source`` are loaded, and the path's layout holds the adapters alone. ``keep_routing``: record experts; None: where there
    are any. ConfigError when they are asked for and cannot be recorded."""
    from corrente.engine.embedded import hf, lean
    from corrente.engine.embedded.adapters import injection_module, load_frozen_model

    trust: dict[str, bool] = {"trust_remote_code": trust_remote_code}
    factors = injection_module().verify_targets(source, adapters, **trust) if adapters is not None else None
    reason = lean.unsupported_reason(config) or (
        lean.unsupported_adapter_reason(config, factors) if factors is not None else ""
    )
    if trust_remote_code and pretrained.has_code(config, kind="AutoModelForCausalLM"):
        reason = "it comes with Python code of its own"
    if path == "lean" and reason:
        raise ConfigError(f"engine.path: lean does not run this {config.model_type}: {reason}; use auto or hf")
    if path == "hf" or reason:
        return hf.HFModel(
            config, dtype=dtype, device=device, source=source, adapters=adapters, keep_routing=keep_routing, **trust
        )
    if keep_routing:
        raise ConfigError(f"model.keep_routing = true: {config.model_type} is no mixture of experts; leave it out")
    if factors is None:
        return lean.LeanModel(config, dtype=dtype, device=device, context=context)
    frozen = load_frozen_model(source, dtype=dtype, **trust).state_dict()
    return lean.LeanModel(config, dtype=dtype, device=device, context=context, frozen=frozen, factors=factors)


def resolve_dtype(name: str, device: str) -> torch.dtype:
    """The torch dtype called ``name``; ``auto`` is bfloat16 on a GPU that supports it, float32 elsewhere. ConfigError."""
    if name == "auto":
        half = device.startswith("cuda") and torch.cuda.is_bf16_supported()
        return torch.bfloat16 if half else torch.float32
    if name not in DTYPES:
        raise ConfigError(f"model.dtype: {name!r} given; auto, {', '.join(DTYPES)} are allowed")
    return DTYPES[name]


def end_token_ids(path: Path, config: PretrainedConfig) -> frozenset[int]:
    """The token ids that end a sequence: those of generation_config.json, else those of the model's configuration."""
    value = None
    if (path / "generation_config.json").is_file():
        value = pretrained.end_tokens(path)
    if value is None:
        value = getattr(config, "eos_token_id", None)
    if value is None:
        return frozenset()
    return frozenset([value] if isinstance(value, int) else value)
