"""Low-rank adapters on frozen weights: y = W x + s B (A x), never merged (Hu et al. 2021, arXiv:2106.09685).

The engine loads the frozen model itself, into its own memory. It receives, and holds two versions of, the factors only. So for
everything else (slots, transports, deltas) an adapter is a small model.

The lean path fuses projections (q, k and v; gate and up). The A's of one fused projection are stacked in one slab, so there is
one small product down, and one product up for each part that has an adapter. The hf path uses peft's modules, whose parameters
become views into the weight buffer.

Only adapters/injection.py knows how a model is adapted; learner and engine both call it. It is imported by path where adapters
are used, because it needs peft.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM

from corrente.adapters.base import PREFIX, Factor
from corrente.engine.embedded.matmul import add_matmul, matmul
from corrente.errors import ConfigError
from corrente.models import pretrained
from corrente.models.progress_bars import no_progress_bars
from corrente.sync.layout import Slab

INJECTION = "corrente.adapters.injection"


def injection_module() -> Any:
    """Import the module that applies peft. ConfigError, with the install command, where peft is missing."""
    return import_module(INJECTION)


def load_frozen_model(path: Path, *, dtype: torch.dtype, trust_remote_code: bool = False) -> Any:
    """The model of a directory with its weights, frozen, in evaluation mode. ConfigError when there is none, or not all
    of it."""
    how: dict[str, Any] = {"dtype": dtype, "output_loading_info": True, "trust_remote_code": trust_remote_code}
    try:
        with no_progress_bars():
            module, notes = pretrained.load(AutoModelForCausalLM, path, **how)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path = {str(path)!r}: not a causal LM that can be loaded: {error}") from error
    if missing := sorted(notes["missing_keys"]):  # transformers fills these with random numbers
        raise ConfigError(f"model.path = {str(path)!r}: there are no weights for {missing[0]}; give a complete model")
    return module.eval().requires_grad_(False)


class _LoraPart(NamedTuple):
    """One layer of a fused projection: its output rows, its rows in the stacked A's, the slab of its B, and its scaling."""

    rows: slice
    ranks: slice
    up: str
    scaling: float


class _LoraProjection(NamedTuple):
    """The adapters of one fused projection: the slab of the stacked A's, and its parts."""

    down: str
    parts: tuple[_LoraPart, ...]


class BoundLora(NamedTuple):
    """The adapters of one fused projection under one version.

    ``down``: the stacked A's (ranks, in). ``ups``: for each part its output rows, its rows in ``down``, B (out, rank), scaling.
    """

    down: torch.Tensor
    ups: tuple[tuple[slice, slice, torch.Tensor, float], ...]

    def add_to(self, y: torch.Tensor, x: torch.Tensor) -> None:
        """Add s B A x to y in place; y (out, tokens) is the product of the frozen weights with x (in, tokens)."""
        small = matmul(self.down, x)
        for rows, ranks, up, scaling in self.ups:
            add_matmul(y[rows], up, small[ranks] * scaling)


class LoraProjections:
    """Places the adapters ``factors`` on the fused projections of a model.

    ``projections``: the weights of each fused projection, by the model's own names. ``outputs``: the rows of each weight.
    """

    def __init__(
        self, factors: Mapping[str, Factor], projections: Mapping[str, Sequence[str]], outputs: Mapping[str, int]
    ) -> None:
        self._factors = factors
        self._slabs: list[tuple[str, tuple[str, ...]]] = []
        self._projections: dict[str, _LoraProjection] = {}
        for name, weights in projections.items():
            self._add_projection(name, weights, outputs)

    def _add_projection(self, name: str, weights: Sequence[str], outputs: Mapping[str, int]) -> None:
        row = rank = 0
        downs: list[str] = []
        parts: list[_LoraPart] = []
        for weight in weights:
            down, up = _factor_names(weight)
            if down in self._factors:
                (ranks, _), scaling = self._factors[down]
                rows = slice(row, row + outputs[weight])
                parts.append(_LoraPart(rows, slice(rank, rank + ranks), f"{name}.up{len(parts)}", scaling))
                self._slabs.append((parts[-1].up, (up,)))
                downs.append(down)
                rank += ranks
            row += outputs[weight]
        if parts:
            self._projections[name] = _LoraProjection(f"{name}.down", tuple(parts))
            self._slabs.append((f"{name}.down", tuple(downs)))

    def weight_slabs(self, dtype: torch.dtype) -> list[Slab]:
        out = []
        for name, sources in self._slabs:
            shapes = [self._factors[source].shape for source in sources]
            shape = (sum(rows for rows, _ in shapes), shapes[0][1])
            kind = str(dtype).removeprefix("torch.")
            out.append(Slab(name=name, shape=shape, dtype=kind, offset=0, sources=sources))
        return out

    def bind_weights(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, BoundLora]:
        """The adapters of each fused projection, as views of ``tensors``."""
        return {
            name: BoundLora(
                tensors[down], tuple((part.rows, part.ranks, tensors[part.up], part.scaling) for part in parts)
            )
            for name, (down, parts) in self._projections.items()
        }


def first_unplaced_adapter(factors: Mapping[str, Factor], projections: Mapping[str, Sequence[str]]) -> str:
    """The first adapter tensor that belongs to no fused projection; empty when all do."""
    placed = {name for weights in projections.values() for weight in weights for name in _factor_names(weight)}
    return next((name for name in factors if name not in placed), "")


def _factor_names(weight: str) -> tuple[str, str]:
    """The names of the factors A and B of a layer's weight."""
    layer = PREFIX + weight.removesuffix("weight")
    return f"{layer}lora_A.weight", f"{layer}lora_B.weight"
