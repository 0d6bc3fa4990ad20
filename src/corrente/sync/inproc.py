"""Weights through two plain buffers in one process: the trivial transport, and the reference for the others.

Writing blocks the event loop, as everything does in a runtime of one process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import anyio.lowlevel
import torch

from corrente.engine.base import Engine
from corrente.errors import SyncError
from corrente.sync import pack
from corrente.sync.layout import Layout
from corrente.sync.slots import SlotSync

Tensors = Callable[[], Mapping[str, torch.Tensor]]


def allocate(layout: Layout, *, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """Two buffers for ``layout``: uint8, (layout.nbytes,), zeroed so that their pages exist."""
    first, second = (torch.zeros(layout.nbytes, dtype=torch.uint8, device=device) for _ in range(2))
    return first, second


class InprocSync(SlotSync):
    """``buffers`` are those the engine is attached to; ``tensors`` gives the learner's weights by name."""

    def __init__(
        self, *, engine: Engine, layout: Layout, buffers: tuple[torch.Tensor, torch.Tensor], tensors: Tensors
    ) -> None:
        super().__init__(engine=engine, export=self._write, nbytes=layout.nbytes)
        self._layout, self._buffers, self._tensors = layout, buffers, tensors

    async def _write(self, slot: int) -> float:
        await anyio.lowlevel.checkpoint()
        start = time.perf_counter()
        try:
            pack.write(self._layout, self._tensors(), self._buffers[slot])
        except SyncError:
            raise
        except Exception as error:
            raise SyncError(f"the learner's weights could not be written: {type(error).__name__}: {error}") from error
        return time.perf_counter() - start
