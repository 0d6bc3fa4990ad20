"""Run the unmodified Hugging Face module of any causal LM over this engine's key/value cache.

Its parameters and persistent buffers become views into the weight buffer. The module is built without initialising weights: their
memory is never touched, and buffers that are not part of the state dict (rotary frequencies) are computed as usual. With adapters
the module is loaded with its weights, which stay its own, and only the adapters' parameters become views.

Shapes: R sequences, Q new tokens of each, N tokens they may attend to, K tokens whose logits are wanted, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.cache_utils import DynamicCache
from transformers.initialization import no_init_weights

from corrente.config import Lora
from corrente.data.routing import Experts
from corrente.engine.embedded.adapters import injection_module, load_frozen_model
from corrente.engine.embedded.kv import KVView, Pair
from corrente.errors import ConfigError
from corrente.models import pretrained
from corrente.models.moe_routing import Routers, find_routers
from corrente.sync.layout import Layout, Slab, arrange


class _ViewCache(DynamicCache):
    """A transformers cache that passes every update to a KVView.

    The module always receives masks and position ids, so it never needs the length of the cache, which is reported as 0.
    """

    def __init__(self, view: KVView) -> None:
        super().__init__()
        self._view = view

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_args: Any, **_kwargs: Any
    ) -> Pair:
        return self._view.update(layer_idx, key_states, value_states)

    def get_seq_length(self, layer_idx: int = 0, *_args: Any, **_kwargs: Any) -> int:
        return 0


class HFModel:
    """Implements ModelRunner for any causal LM with keys and values per token and explicit position ids."""

    def __init__(
        self,
        config: PretrainedConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        source: Path | None = None,
        adapters: Lora | None = None,
        keep_routing: bool | None = False,
        trust_remote_code: bool = False,
    ) -> None:
        self._adapted = adapters is not None and source is not None
        if adapters is not None and source is not None:
            self._module = load_frozen_model(source, dtype=dtype, trust_remote_code=trust_remote_code)
            injection_module().inject_adapters(self._module, adapters, source=source)
            self._module.eval().requires_grad_(False)
        else:
            self._module = _build_without_weights(config, dtype, trust_remote_code=trust_remote_code)
        self._routers = _start_recording(self._module, required=keep_routing) if keep_routing is not False else None
        self._tensors = self._bindable_tensors()
        self._layout = _layout_of(self._tensors)
        for tensor in self._tensors.values():
            tensor.data = torch.empty(0, dtype=tensor.dtype)
        self._module.to(device)
        self._tensors = self._bindable_tensors()
        names = inspect.signature(self._module.forward).parameters
        self._cache_name = "cache" if "cache" in names else "past_key_values"
        self._takes_logits_to_keep = "logits_to_keep" in names

    def _bindable_tensors(self) -> dict[str, torch.Tensor]:
        """The tensors that ``bind_weights`` replaces, by name."""
        return injection_module().adapter_parameters(self._module) if self._adapted else _state_tensors(self._module)

    def layout(self) -> Layout:
        return self._layout

    def bind_weights(self, tensors: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            self._tensors[name].data = tensor

    def routing_shape(self) -> tuple[int, int] | None:
        return self._routers.shape if self._routers else None

    def recorded_experts(self) -> Experts:
        assert self._routers is not None
        return self._routers.recorded_experts()

    def forward(
        self, ids_RQ: torch.Tensor, positions_RQ: torch.Tensor, mask_R1QN: torch.Tensor, kv: KVView, keep: torch.Tensor
    ) -> torch.Tensor:
        one_row = len(ids_RQ) == 1  # logits_to_keep indexes the token dimension, the same for all rows of a batch
        extra = {"logits_to_keep": keep} if self._takes_logits_to_keep and one_row else {}
        out = self._module(
            input_ids=ids_RQ,
            position_ids=positions_RQ,
            attention_mask=mask_R1QN,
            use_cache=True,
            **{self._cache_name: _ViewCache(kv)},
            **extra,
        )
        logits = out.logits.flatten(0, 1)
        return logits if extra else logits.index_select(0, keep)


def _start_recording(module: torch.nn.Module, *, required: bool | None) -> Routers | None:
    """Find the routers of a mixture of experts and let them record; None where nothing can be recorded.

    ConfigError instead of None when recording is ``required``.
    """
    found = find_routers(module)
    if isinstance(found, str):
        if required:
            raise ConfigError(
                f"model.keep_routing = true: the experts of this model cannot be kept: {found}; leave it out"
            )
        return None
    found.recording = True
    return found


def _build_without_weights(config: PretrainedConfig, dtype: torch.dtype, *, trust_remote_code: bool) -> Any:
    """The module without initialised weights."""
    with no_init_weights():
        module = pretrained.from_config(AutoModelForCausalLM, config, trust_remote_code=trust_remote_code, dtype=dtype)
    module.tie_weights()
    return module.eval().requires_grad_(False)


def _state_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The parameters and persistent buffers by name, tied ones once."""
    persistent = module.state_dict().keys()
    buffers = {name: buffer for name, buffer in module.named_buffers() if name in persistent}
    return {**dict(module.named_parameters()), **buffers}


def _layout_of(state: Mapping[str, torch.Tensor]) -> Layout:
    return arrange(
        [
            Slab(name=name, shape=tuple(t.shape), dtype=str(t.dtype).removeprefix("torch."), offset=0, sources=(name,))
            for name, t in state.items()
        ]
    )
