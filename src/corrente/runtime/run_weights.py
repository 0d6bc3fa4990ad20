"""The memory that the weights of a run lie in, and the layout that all its engines share."""

from __future__ import annotations

from typing import Any

from corrente.errors import ConfigError
from corrente.sync.layout import Layout


class RunWeights:
    """Implements SharedWeights over ``memory`` (sync/shared_memory.py), or over none where engines have slots of their own."""

    def __init__(self, memory: Any = None) -> None:
        self._memory = memory
        self.layout: Layout | None = None
        """The layout that every engine of the run wants; None until the first has declared it."""

    @property
    def fd(self) -> int | None:
        return None if self._memory is None else self._memory.fd

    @property
    def path(self) -> str:
        return "" if self._memory is None else self._memory.path

    def fit(self, layout: Layout) -> None:
        """See SharedWeights."""
        if self.layout is None:
            if self._memory is not None:
                self._memory.reserve(layout.nbytes)
            self.layout = layout
        elif layout != self.layout:
            raise ConfigError(f"an engine with another model: {describe_difference(layout, self.layout)}")

    def close(self) -> None:
        """Close the memory; processes that mapped it keep it."""
        if self._memory is not None:
            self._memory.close()


def describe_difference(offered: Layout, wanted: Layout) -> str:
    """The first tensor in which a layout differs from the run's, in words."""
    for mine, theirs in zip(offered.slabs, wanted.slabs, strict=False):
        if mine != theirs:
            shape = f"{mine.name} is {mine.dtype} {tuple(mine.shape)}"
            return f"{shape}, where the run has {theirs.name} as {theirs.dtype} {tuple(theirs.shape)}"
    return f"it has {len(offered.slabs)} tensors, the run {len(wanted.slabs)}"
