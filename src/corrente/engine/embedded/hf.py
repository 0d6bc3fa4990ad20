"""The unmodified Hugging Face module of any causal LM, over this engine's own cache.

Its parameters and persistent buffers become views into the weight buffer. The module is built without initialising weights:
their memory is never touched, and buffers that are not part of the state dict (rotary frequencies) are computed as usual.
With adapters it is built with its weights, which stay its own, and the adapters' parameters are what become views.
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
from corrente.engine.embedded.adapters import injection, load_frozen
from corrente.engine.embedded.kv import KVView, Pair
from corrente.errors import ConfigError
from corrente.models.moe_routing import Routers, routers_of
from corrente.sync.layout import Layout, Slab, arrange


class _Cache(DynamicCache):
    """What the module takes for its cache: hands every update to a view of ours. Masks and positions are always given to
    the module, so it has no reason to ask how much is held."""

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
    """Any causal LM with keys and values per token and explicit position ids."""

    def __init__(
        self,
        config: PretrainedConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        source: Path | None = None,
        adapters: Lora | None = None,
        keep_routing: bool | None = False,
    ) -> None:
        self._adapted = adapters is not None and source is not None
        if adapters is not None and source is not None:
            self._module = load_frozen(source, dtype=dtype)
            injection().inject_adapters(self._module, adapters, source=source)
            self._module.eval().requires_grad_(False)
        else:
            self._module = _empty(config, dtype)
        self._routers = _recording(self._module, demanded=keep_routing) if keep_routing is not False else None
        self._slots = self._state()
        self._layout = _layout(self._slots)
        for tensor in self._slots.values():
            tensor.data = torch.empty(0, dtype=tensor.dtype)
        self._module.to(device)
        self._slots = self._state()
        names = inspect.signature(self._module.forward).parameters
        self._cache_name = "cache" if "cache" in names else "past_key_values"
        self._keeps = "logits_to_keep" in names

    def _state(self) -> dict[str, torch.Tensor]:
        """What is bound, by name."""
        return injection().adapter_parameters(self._module) if self._adapted else _state(self._module)

    def layout(self) -> Layout:
        return self._layout

    def bind(self, tensors: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            self._slots[name].data = tensor

    def routing(self) -> tuple[int, int] | None:
        return self._routers.shape if self._routers else None

    def routed(self) -> Experts:
        assert self._routers is not None
        return self._routers.recorded()

    def forward(
        self, ids_RQ: torch.Tensor, positions_RQ: torch.Tensor, mask_R1QN: torch.Tensor, kv: KVView, keep: torch.Tensor
    ) -> torch.Tensor:
        one_row = len(ids_RQ) == 1
        extra = {"logits_to_keep": keep} if self._keeps and one_row else {}
        out = self._module(
            input_ids=ids_RQ,
            position_ids=positions_RQ,
            attention_mask=mask_R1QN,
            use_cache=True,
            **{self._cache_name: _Cache(kv)},
            **extra,
        )
        logits = out.logits.flatten(0, 1)
        return logits if extra else logits.index_select(0, keep)


def _recording(module: torch.nn.Module, *, demanded: bool | None) -> Routers | None:
    """The routers of a mixture of experts, which record from now on; None where nothing can be recorded."""
    found = routers_of(module)
    if isinstance(found, str):
        if demanded:
            raise ConfigError(
                f"model.keep_routing = true: the experts of this model cannot be kept: {found}; leave it out"
            )
        return None
    found.recording = True
    return found


def _empty(config: PretrainedConfig, dtype: torch.dtype) -> Any:
    """The module without initialised weights."""
    with no_init_weights():
        module: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    module.tie_weights()
    return module.eval().requires_grad_(False)


def _state(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers, tied ones once."""
    persistent = module.state_dict().keys()
    buffers = {name: buffer for name, buffer in module.named_buffers() if name in persistent}
    return {**dict(module.named_parameters()), **buffers}


def _layout(state: Mapping[str, torch.Tensor]) -> Layout:
    return arrange(
        [
            Slab(name=name, shape=tuple(t.shape), dtype=str(t.dtype).removeprefix("torch."), offset=0, sources=(name,))
            for name, t in state.items()
        ]
    )
