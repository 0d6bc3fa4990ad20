"""The place of each engine tensor in a weight buffer, and the learner parameters that it is made of.

The engine says what layout it wants; the learner writes straight into it. A flip then costs no copy: the engine's tensors are
views into the buffer. Plain data, no torch, so that it crosses process and host boundaries.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

ALIGN = 64
ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "bool": 1}


class Slab(msgspec.Struct, frozen=True, kw_only=True):
    """One engine tensor: ``sources`` (the learner's state-dict names) concatenated along dimension 0, then transposed to
    [in, out] if ``transpose``; stored contiguously with ``shape`` and ``dtype`` at byte ``offset``."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    sources: tuple[str, ...]
    transpose: bool = False

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEMSIZE[self.dtype]


class Layout(msgspec.Struct, frozen=True):
    """All slabs of one engine, and the size of a buffer that holds them."""

    slabs: tuple[Slab, ...]

    @property
    def nbytes(self) -> int:
        return max((slab.offset + slab.nbytes for slab in self.slabs), default=0)


def arrange(wanted: Sequence[Slab]) -> Layout:
    """Assign offsets, in order, each aligned to a cache line; offsets given are ignored."""
    at, slabs = 0, []
    for slab in wanted:
        slabs.append(msgspec.structs.replace(slab, offset=at))
        at += -(-slab.nbytes // ALIGN) * ALIGN
    return Layout(tuple(slabs))
