"""What a model path offers the engine, and which path a checkpoint gets.

Two paths behind one interface: ``hf`` runs the unmodified Hugging Face module of any causal LM; ``lean`` is a fused forward for
the Llama family. Both are built from the configuration alone; weights arrive as views into a buffer that somebody else fills.
With adapters both hold the frozen weights themselves, and only the adapters arrive.

Shapes: R sequences, Q new tokens of each, N tokens they may look at, K tokens whose next-token logits are wanted, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PretrainedConfig

from corrente.config import Lora
from corrente.data.routing import Experts
from corrente.engine.embedded.kv import KVView
from corrente.errors import ConfigError
from corrente.models.limits import DEFAULT_CONTEXT, positions
from corrente.sync.layout import Layout

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class ModelPath(Protocol):
    """Contract: no state but the bound weights; one forward pass for prefill and decode alike."""

    def layout(self) -> Layout:
        """The slabs this path wants its weights in."""
        ...

    def bind(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Use these views, by slab name, from now on. Copies nothing."""
        ...

    def forward(
        self, ids_RQ: torch.Tensor, positions_RQ: torch.Tensor, mask_R1QN: torch.Tensor, kv: KVView, keep: torch.Tensor
    ) -> torch.Tensor:
        """Next-token logits (K, V) of the tokens at flat indices ``keep`` (K,) of (R, Q). ``mask`` is additive."""
        ...

    def routing(self) -> tuple[int, int] | None:
        """Layers and choices of the experts of a token; None where they are not recorded."""
        ...

    def routed(self) -> Experts:
        """Experts (R x Q, layers, choices) of the latest forward pass. Only where ``routing`` is not None."""
        ...


def read_config(path: Path) -> PretrainedConfig:
    """The model's configuration; ConfigError when the directory holds none, or one this engine cannot serve."""
    if not (path / "config.json").is_file():
        raise ConfigError(
            f"model.path: {str(path)!r} holds no config.json; give a directory with a Hugging Face causal LM"
        )
    config = AutoConfig.from_pretrained(path)
    reason = unsupported(config)
    if reason:
        raise ConfigError(f"model.path: {str(path)!r} ({config.model_type}) cannot be served: {reason}")
    return config


def unsupported(config: PretrainedConfig) -> str:
    """Why a slot cache of keys and values cannot serve this architecture; empty when it can."""
    if config.is_encoder_decoder:
        return "it is an encoder-decoder"
    if type(config) not in AutoModelForCausalLM._model_mapping:
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
    module: Any = AutoModelForCausalLM._model_mapping[type(config)]
    if getattr(module, "_is_stateful", False):
        return "it keeps a recurrent state"
    if "position_ids" not in inspect.signature(module.forward).parameters:
        return "its forward pass takes no position_ids"
    return ""


def context_limit(config: PretrainedConfig, wanted: int) -> int:
    """Tokens of prompt and completion together."""
    limit = positions(config.get_text_config().to_dict(), windowed=True) or DEFAULT_CONTEXT
    if wanted > limit:
        raise ConfigError(f"engine.max_context: {wanted} given, but the model allows at most {limit}")
    return wanted or min(limit, DEFAULT_CONTEXT)


def build(
    config: PretrainedConfig,
    *,
    path: str,
    dtype: torch.dtype,
    device: torch.device,
    context: int,
    source: Path,
    adapters: Lora | None = None,
    keep_routing: bool | None = False,
) -> ModelPath:
    """The model path called ``path``; ``auto`` is lean where it applies. With ``adapters``, the weights of the model in
    ``source`` are loaded, and the path's layout holds the adapters alone. ``keep_routing``: record experts; None: where there
    are any. ConfigError when they are asked for and cannot be recorded."""
    from corrente.engine.embedded import hf, lean
    from corrente.engine.embedded.adapters import injection, load_frozen

    factors = injection().verify_targets(source, adapters) if adapters is not None else None
    reason = lean.unsupported(config) or (lean.unsupported_adapters(config, factors) if factors is not None else "")
    if path == "lean" and reason:
        raise ConfigError(f"engine.path: lean does not run this {config.model_type}: {reason}; use auto or hf")
    if path == "hf" or reason:
        return hf.HFModel(
            config, dtype=dtype, device=device, source=source, adapters=adapters, keep_routing=keep_routing
        )
    if keep_routing:
        raise ConfigError(f"model.keep_routing = true: {config.model_type} is no mixture of experts; leave it out")
    if factors is None:
        return lean.LeanModel(config, dtype=dtype, device=device, context=context)
    frozen = load_frozen(source, dtype=dtype).state_dict()
    return lean.LeanModel(config, dtype=dtype, device=device, context=context, frozen=frozen, factors=factors)


def resolve_dtype(name: str, device: str) -> torch.dtype:
    """``auto`` is bfloat16 on an accelerator that has it, float32 elsewhere."""
    if name == "auto":
        half = device.startswith("cuda") and torch.cuda.is_bf16_supported()
        return torch.bfloat16 if half else torch.float32
    if name not in DTYPES:
        raise ConfigError(f"model.dtype: {name!r} given; auto, {', '.join(DTYPES)} are allowed")
    return DTYPES[name]


def end_ids(path: Path, config: PretrainedConfig) -> frozenset[int]:
    """Ids that end a sequence: those of generation_config.json, or, where it has none, of the model's configuration."""
    value = None
    if (path / "generation_config.json").is_file():
        value = GenerationConfig.from_pretrained(path).eos_token_id
    if value is None:
        value = getattr(config, "eos_token_id", None)
    if value is None:
        return frozenset()
    return frozenset([value] if isinstance(value, int) else value)
