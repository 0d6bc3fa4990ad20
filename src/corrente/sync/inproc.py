"""Weights through plain buffers in one process: the trivial transport, and the reference for the others.

Copying blocks the event loop, as everything does in a runtime of one process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import anyio.lowlevel
import torch

from corrente.config import Inproc
from corrente.errors import SyncError
from corrente.sync.base import OfferRequest, Update
from corrente.sync.layout import Layout
from corrente.sync.offers import Offer
from corrente.sync.sender import SenderSetup, WeightSender
from corrente.sync.shm import SharedSender
from corrente.sync.slot_sync import SlotSync, VersionedReceiver

Tensors = Callable[[], Mapping[str, torch.Tensor]]


class InprocSync(SlotSync):
    """``buffers`` are those the engine is attached to, one or two; ``tensors`` gives the learner's weights by name.

    An export delivers as well. Nothing is moved by that, and a step of the learner blocks the event loop: a delivery left to
    another task would come after the next step, and the flip a step later than it could.
    """

    def __init__(
        self, *, engine: VersionedReceiver, layout: Layout, buffers: Sequence[torch.Tensor], tensors: Tensors
    ) -> None:
        transport = SharedSender(Inproc(), SenderSetup(layout=layout, folder=Path()))
        sender = WeightSender(layout=layout, slots=buffers, transport=transport)
        super().__init__(engine=engine, sender=_DirectSender(sender, tensors), shared=True, slots=len(buffers))

    async def export(self, version: int) -> None:
        """See Sync.export."""
        await super().export(version)
        await super().deliver(version)

    async def deliver(self, version: int) -> Update:
        """See Sync.deliver."""
        if self._staged is not None and self._staged.version == version:
            return self._staged
        return await super().deliver(version)


class _DirectSender:
    """A Sender whose learner is in this process."""

    def __init__(self, sender: WeightSender, tensors: Tensors) -> None:
        self._sender, self._tensors = sender, tensors

    async def export(self, version: int, *, slot: int) -> float:
        await anyio.lowlevel.checkpoint()
        try:
            return self._sender.export(version, self._tensors(), slot=slot)
        except SyncError:
            raise
        except Exception as error:
            raise SyncError(f"the learner's weights could not be sent: {type(error).__name__}: {error}") from error

    async def offer(self, request: OfferRequest) -> Offer:
        return self._sender.offer(request)
