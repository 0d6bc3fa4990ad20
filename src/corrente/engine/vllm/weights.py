"""Two sets of weights for one vLLM model, and the flip between them. Runs inside vLLM's worker.

On a CPU vLLM packs the weight of every linear layer for its matrix product and gives the original up. A new version is packed
the same way, by vLLM's own code, while requests run; the flip then exchanges which packed weight a layer multiplies with:
pointers, nothing is copied. On an accelerator, where captured graphs hold the addresses of the parameters, a new version is
copied to the device while requests run, and the flip is a copy within its memory.

The forward pass must not be compiled on a CPU (--enforce-eager): a compiled one may have remembered the old pointers.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from corrente.engine.vllm.layout import Parameter, build, checkpoint_shapes
from corrente.errors import ConfigError, SyncError
from corrente.sync.layout import Layout
from corrente.sync.weight_slots import slab_views

Change = tuple[Any, str, Any]
"""An object, its attribute, and the value that a flip gives it; of every parameter."""


class WeightsReady(NamedTuple):
    """A version that can be installed."""

    version: int
    changes: list[Change]


class _Spare(torch.nn.Module):
    """A stand-in for a linear layer, for vLLM to pack the weight of: what it leaves behind is what a flip installs."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else torch.nn.Parameter(bias, requires_grad=False)


class VllmWeights:
    """The weights of ``model``, of which two versions may be held. ``folder`` is the checkpoint it was loaded from."""

    def __init__(self, model: torch.nn.Module, *, folder: Path, dtype: torch.dtype, compiled: bool) -> None:
        self._model = model
        self._parameters = dict(model.named_parameters())
        self._device = next(iter(self._parameters.values())).device
        if compiled and self._device.type == "cpu":
            raise ConfigError("vLLM compiles this model; on a CPU weights can only be changed with --enforce-eager")
        self._packed = _packed_layers(model) if self._device.type == "cpu" else {}
        self._padded = _padded_names(model)
        self.layout = self._describe(folder, dtype)
        self._ready: list[WeightsReady | None] = [None, None]
        self._replaced: list[Any] = []
        """What the last flip took out: given up by the next ``prepare``, for freeing it takes longer than a flip may."""

    def _describe(self, folder: Path, dtype: torch.dtype) -> Layout:
        names = dict(self._model.named_parameters(remove_duplicate=False))
        parameters = [
            Parameter(
                name=name,
                shape=tuple(parameter.shape) if parameter.numel() else None,
                pads=name in self._padded,
                aliases=tuple(other for other, same in names.items() if same is parameter and other != name),
            )
            for name, parameter in self._parameters.items()
        ]
        mapper = getattr(self._model, "hf_to_vllm_mapper", None)

        def place(name: str) -> tuple[str, Any] | None:
            return (name, None) if mapper is None else mapper._map_name_with_shard(name)

        return build(parameters, checkpoint_shapes(folder), place, dtype=str(dtype).removeprefix("torch."))

    def discard(self, slot: int) -> None:
        """What was ready in ``slot`` is to be installed no more: its memory is about to change."""
        self._ready[slot] = None
        self._replaced.clear()

    def prepare(self, slot: int, version: int, buffer: torch.Tensor) -> None:
        """Make what is in ``buffer`` ready to be installed. Long; any thread, while the model runs on the other slot."""
        tensors = slab_views(self.layout, buffer)
        changes = self._pack(tensors) if self._device.type == "cpu" else self._upload(tensors)
        self._ready[slot] = WeightsReady(version, changes)

    def install(self, slot: int, version: int) -> None:
        """Sample from ``slot`` from now on. Between two steps of the model only. SyncError when it does not hold ``version``."""
        ready = self._ready[slot] if slot in (0, 1) else None
        if ready is None or ready.version != version:
            holds = "nothing" if ready is None else f"version {ready.version}"
            raise SyncError(f"weight slot {slot} holds {holds}, not version {version}")
        if self._device.type != "cpu":
            for parameter, _, value in ready.changes:
                parameter.data[: len(value)].copy_(value) if value.ndim else parameter.data.copy_(value)
            torch.accelerator.synchronize()
            return
        self._replaced = [getattr(owner, attribute) for owner, attribute, _ in ready.changes]
        for owner, attribute, value in ready.changes:
            setattr(owner, attribute, value)

    def _pack(self, tensors: Mapping[str, torch.Tensor]) -> list[Change]:
        changes: list[Change] = []
        taken: set[str] = set()
        for weight_name, bias_name, layer in self._packed.values():
            bias = None if bias_name is None else tensors[bias_name].clone()
            spare = _Spare(self._padded_view(weight_name, tensors[weight_name]), bias)
            _vllm_pack(spare)
            changes.append((layer, "cpu_linear", spare.cpu_linear))
            if spare.bias is not None:
                changes.append((layer.bias, "data", spare.bias.data))
                taken.add(bias_name or "")
            if not self._parameters[weight_name].numel():
                taken.add(weight_name)
        for name, view in tensors.items():
            if name not in taken:
                changes.append((self._parameters[name], "data", self._padded_view(name, view)))
        return changes

    def _padded_view(self, name: str, view: torch.Tensor) -> torch.Tensor:
        """``view`` itself, or a copy with the rows that vLLM adds to a vocabulary."""
        has = self._parameters[name].shape
        if name not in self._padded or not has.numel() or has[0] == len(view):
            return view
        padded = torch.zeros(has, dtype=view.dtype)
        padded[: len(view)] = view
        return padded

    def _upload(self, tensors: Mapping[str, torch.Tensor]) -> list[Change]:
        stream = torch.Stream(self._device)
        with stream:
            staged = {name: view.to(self._device, non_blocking=True) for name, view in tensors.items()}
        stream.synchronize()
        return [(self._parameters[name], "data", tensor) for name, tensor in staged.items()]


def _packed_layers(model: torch.nn.Module) -> dict[str, tuple[str, str | None, Any]]:
    """Layers that multiply with a packed weight: by their name, the names of weight and bias, and the layer."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    names = {id(parameter): name for name, parameter in model.named_parameters()}
    packed: dict[str, tuple[str, str | None, Any]] = {}
    for name, module in model.named_modules():
        looked_up = isinstance(module, VocabParallelEmbedding) and not isinstance(module, ParallelLMHead)
        if looked_up or not hasattr(module, "cpu_linear"):
            continue
        bias = getattr(module, "bias", None)
        packed[name] = (names[id(module.weight)], None if bias is None else names[id(bias)], module)
    return packed


def _padded_names(model: torch.nn.Module) -> set[str]:
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    names = {id(parameter): name for name, parameter in model.named_parameters()}
    tables = (m for m in model.modules() if isinstance(m, VocabParallelEmbedding))
    return {names[id(table.weight)] for table in tables}


def _vllm_pack(spare: _Spare) -> None:
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    dispatch_cpu_unquantized_gemm(spare, remove_weight=True)
