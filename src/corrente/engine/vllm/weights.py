"""Two sets of weights for one vLLM model, and the flip between them. Runs inside vLLM's worker.

On a CPU vLLM packs the weight of every linear layer for its matrix product and frees the original. A new version is packed the
same way, by vLLM's own code, while requests run; the flip then exchanges the packed weight of each layer by pointer, without a
copy. On an accelerator, where captured graphs hold the addresses of the parameters, a new version is copied to the device while
requests run, and the flip is a copy within the device's memory.

The forward pass must not be compiled on a CPU (--enforce-eager): a compiled one may hold the old pointers.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from corrente.engine.vllm.layout import Parameter, build_layout, checkpoint_shapes
from corrente.errors import ConfigError, SyncError
from corrente.sync.layout import Layout
from corrente.sync.weight_slots import slab_views

AttributeChange = tuple[Any, str, Any]
"""(object, attribute, new value): one assignment of a flip."""


class ReadyWeights(NamedTuple):
    """A version that is ready to be installed, and the assignments that install it."""

    version: int
    changes: list[AttributeChange]


class _PackTarget(torch.nn.Module):
    """A stand-in for a linear layer, whose weight vLLM packs; the flip then installs the packed weight in the real layer."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else torch.nn.Parameter(bias, requires_grad=False)


class VllmWeights:
    """Holds up to two versions of the weights of ``model``. ``folder``: the checkpoint it was loaded from.

    ConfigError for a compiled model on a CPU, and for one whose parameters are not those of the checkpoint.
    """

    def __init__(self, model: torch.nn.Module, *, folder: Path, dtype: torch.dtype, compiled: bool) -> None:
        self._model = model
        self._parameters = dict(model.named_parameters())
        self._device = next(iter(self._parameters.values())).device
        if compiled and self._device.type == "cpu":
            raise ConfigError("vLLM compiles this model; on a CPU weights can only be changed with --enforce-eager")
        self._packed = _packed_layers(model) if self._device.type == "cpu" else {}
        self._padded = _padded_names(model)
        self.layout = self._build_layout(folder, dtype)
        self._ready: list[ReadyWeights | None] = [None, None]
        self._replaced: list[Any] = []
        """The values that the last flip replaced. ``discard_slot`` frees them, because that takes longer than a flip may."""

    def _build_layout(self, folder: Path, dtype: torch.dtype) -> Layout:
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

        return build_layout(parameters, checkpoint_shapes(folder), place, dtype=str(dtype).removeprefix("torch."))

    def discard_slot(self, slot: int) -> None:
        """Forget the version that was ready in ``slot``, because its memory is about to change."""
        self._ready[slot] = None
        self._replaced.clear()

    def prepare_slot(self, slot: int, version: int, buffer: torch.Tensor) -> None:
        """Make what is in ``buffer`` ready to be installed. Long; any thread, while the model runs on the other slot."""
        tensors = slab_views(self.layout, buffer)
        changes = self._pack_on_cpu(tensors) if self._device.type == "cpu" else self._upload_to_device(tensors)
        self._ready[slot] = ReadyWeights(version, changes)

    def install_slot(self, slot: int, version: int) -> None:
        """Sample from ``slot`` from now on; call it between two steps only. SyncError when it does not hold ``version``."""
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

    def _pack_on_cpu(self, tensors: Mapping[str, torch.Tensor]) -> list[AttributeChange]:
        changes: list[AttributeChange] = []
        taken: set[str] = set()
        for weight_name, bias_name, layer in self._packed.values():
            bias = None if bias_name is None else tensors[bias_name].clone()
            spare = _PackTarget(self._padded_view(weight_name, tensors[weight_name]), bias)
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
        """Return ``view``, or a copy with the rows that vLLM adds to a vocabulary."""
        has = self._parameters[name].shape
        if name not in self._padded or not has.numel() or has[0] == len(view):
            return view
        padded = torch.zeros(has, dtype=view.dtype)
        padded[: len(view)] = view
        return padded

    def _upload_to_device(self, tensors: Mapping[str, torch.Tensor]) -> list[AttributeChange]:
        stream = torch.Stream(self._device)
        with stream:
            staged = {name: view.to(self._device, non_blocking=True) for name, view in tensors.items()}
        stream.synchronize()
        return [(self._parameters[name], "data", tensor) for name, tensor in staged.items()]


def _packed_layers(model: torch.nn.Module) -> dict[str, tuple[str, str | None, Any]]:
    """The layers that multiply with a packed weight, by name: the names of weight and bias, and the layer."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    names = {id(parameter): name for name, parameter in model.named_parameters()}
    packed: dict[str, tuple[str, str | None, Any]] = {}
    for name, module in model.named_modules():
        # An embedding is looked up in its plain weight, packed or not; only an output head multiplies with the packed one.
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


def _vllm_pack(spare: _PackTarget) -> None:
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    dispatch_cpu_unquantized_gemm(spare, remove_weight=True)
