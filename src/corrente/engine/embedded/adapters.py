"""Low-rank adapters beside frozen weights: y = W x + s B (A x), the product added on the fly (Hu et al. 2021, arXiv:2106.09685).

The engine loads the frozen model itself, into memory of its own; what it is sent, and keeps two versions of, are the factors
alone. So to everything else (slots, transports, deltas) an adapter is a small model.

Beside the fused products of the lean path: the A's of one product lie below one another, so there is one small product down, and
one up per part that has an adapter. The hf path has the modules of peft, whose parameters become views into the buffer.

How a model is adapted is known to adapters/injection.py alone, which learner and engine both call; it is imported by its path,
where adapters are used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM

from corrente.adapters.base import PREFIX, Factor
from corrente.engine.embedded.products import add_product, product
from corrente.errors import ConfigError
from corrente.models import pretrained
from corrente.models.progress_bars import no_progress_bars
from corrente.sync.layout import Slab

INJECTION = "corrente.adapters.injection"


def injection() -> Any:
    """The module that knows peft. ConfigError, with what to install, where that is missing."""
    return import_module(INJECTION)


def load_frozen(path: Path, *, dtype: torch.dtype, trust_remote_code: bool = False) -> Any:
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


class _Part(NamedTuple):
    """One layer within a fused product: its rows there, its ranks among those of all A's, its B's slab, and its scaling."""

    rows: slice
    ranks: slice
    up: str
    scaling: float


class _Product(NamedTuple):
    """The adapters of one fused product: the slab of all A's, and its parts."""

    down: str
    parts: tuple[_Part, ...]


class LowRank(NamedTuple):
    """The adapters of one fused product under one version: A's (ranks, in), and per part where B A x is added."""

    down: torch.Tensor
    ups: tuple[tuple[slice, slice, torch.Tensor, float], ...]

    def add_to(self, y: torch.Tensor, x: torch.Tensor) -> None:
        """y += s B A x, in place; y (out, tokens) is the product of the frozen weights with x (in, tokens)."""
        small = product(self.down, x)
        for rows, ranks, up, scaling in self.ups:
            add_product(y[rows], up, small[ranks] * scaling)


class LowRankProducts:
    """The adapters ``factors`` as slabs beside the products of a model. ``products``: each fused product's weights by the
    model's own names; ``outputs``: the rows of each weight."""

    def __init__(
        self, factors: Mapping[str, Factor], products: Mapping[str, Sequence[str]], outputs: Mapping[str, int]
    ) -> None:
        self._factors = factors
        self._slabs: list[tuple[str, tuple[str, ...]]] = []
        self._products: dict[str, _Product] = {}
        for name, weights in products.items():
            self._place(name, weights, outputs)

    def _place(self, name: str, weights: Sequence[str], outputs: Mapping[str, int]) -> None:
        row = rank = 0
        downs: list[str] = []
        parts: list[_Part] = []
        for weight in weights:
            down, up = _names(weight)
            if down in self._factors:
                (ranks, _), scaling = self._factors[down]
                rows = slice(row, row + outputs[weight])
                parts.append(_Part(rows, slice(rank, rank + ranks), f"{name}.up{len(parts)}", scaling))
                self._slabs.append((parts[-1].up, (up,)))
                downs.append(down)
                rank += ranks
            row += outputs[weight]
        if parts:
            self._products[name] = _Product(f"{name}.down", tuple(parts))
            self._slabs.append((f"{name}.down", tuple(downs)))

    def slabs(self, dtype: torch.dtype) -> list[Slab]:
        out = []
        for name, sources in self._slabs:
            shapes = [self._factors[source].shape for source in sources]
            shape = (sum(rows for rows, _ in shapes), shapes[0][1])
            kind = str(dtype).removeprefix("torch.")
            out.append(Slab(name=name, shape=shape, dtype=kind, offset=0, sources=sources))
        return out

    def bind(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, LowRank]:
        """By product, what is added to it."""
        return {
            name: LowRank(
                tensors[down], tuple((part.rows, part.ranks, tensors[part.up], part.scaling) for part in parts)
            )
            for name, (down, parts) in self._products.items()
        }


def left_over(factors: Mapping[str, Factor], products: Mapping[str, Sequence[str]]) -> str:
    """The first adapter tensor that belongs to no product; empty when all do."""
    placed = {name for weights in products.values() for weight in weights for name in _names(weight)}
    return next((name for name in factors if name not in placed), "")


def _names(weight: str) -> tuple[str, str]:
    """What the factors of a layer's weight are called, A and B."""
    layer = PREFIX + weight.removesuffix("weight")
    return f"{layer}lora_A.weight", f"{layer}lora_B.weight"
