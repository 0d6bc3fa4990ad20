"""Weights through two plain buffers in one process: the trivial transport, and the reference for the others.

Writing blocks the event loop, as everything does in a runtime of one process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import anyio.lowlevel
import torch

from corrente.errors import SyncError
from corrente.sync.base import Exported, Offer, Order
from corrente.sync.layout import Layout
from corrente.sync.outbox import Outbox
from corrente.sync.shm import Shared
from corrente.sync.slots import SlotSync, VersionedReceiver

Tensors = Callable[[], Mapping[str, torch.Tensor]]


def allocate(layout: Layout, *, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """Two buffers for ``layout``: uint8, (layout.nbytes,), zeroed so that their pages exist."""
    first, second = (torch.zeros(layout.nbytes, dtype=torch.uint8, device=device) for _ in range(2))
    return first, second


class InprocSync(SlotSync):
    """``buffers`` are those the engine is attached to; ``tensors`` gives the learner's weights by name."""

    def __init__(
        self, *, engine: VersionedReceiver, layout: Layout, buffers: tuple[torch.Tensor, torch.Tensor], tensors: Tensors
    ) -> None:
        outbox = Outbox(layout=layout, slots=buffers, outlet=Shared())
        super().__init__(engine=engine, sender=_Direct(outbox, tensors), shared=True)


class _Direct:
    """A Sender whose learner is in this process."""

    def __init__(self, outbox: Outbox, tensors: Tensors) -> None:
        self._outbox, self._tensors = outbox, tensors

    async def export(self, order: Order) -> Exported:
        await anyio.lowlevel.checkpoint()
        try:
            return self._outbox.export(order, self._tensors())
        except SyncError:
            raise
        except Exception as error:
            raise SyncError(f"the learner's weights could not be sent: {type(error).__name__}: {error}") from error

    async def again(self, order: Order) -> Offer:
        await anyio.lowlevel.checkpoint()
        return self._outbox.again(order)
