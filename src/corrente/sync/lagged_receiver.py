"""The memory of a follower: what is offered is fetched into the spare slot of many. See lagged.py.

Where learner and engines share memory, a version lies there only until the next but one is written: it is copied out.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from corrente.errors import SyncError
from corrente.sync.base import Update
from corrente.sync.kinds import transport_of_offer
from corrente.sync.lagged import VersionRing
from corrente.sync.layout import Layout
from corrente.sync.offers import Offer
from corrente.sync.receiver import WeightReceiver
from corrente.sync.weight_slots import allocate_slots


class LaggedReceiver:
    """``slots``: uint8, (layout.nbytes,) each, lag + 2 of them on ``device``, for the engine that uses them. ``shared``: the two
    that the learner writes into, where there are any in this process; other offers are fetched as an engine fetches them."""

    def __init__(self, layout: Layout, *, lag: int, shared: Sequence[torch.Tensor] = (), device: str = "cpu") -> None:
        self._ring, self._shared = VersionRing(lag), shared
        self.slots = allocate_slots(layout, device=device, count=self._ring.slots)
        self._receiver = _IntoSpare(layout)
        self._arrived: tuple[int, int] | None = None
        self._turn = threading.Lock()

    def receive(self, offer: Offer) -> None:
        """Have what is offered in the spare slot. Blocks: call it from a thread beside the one that computes. SyncError when it
        could not be had."""
        if offer.base is not None:
            raise SyncError(f"version {offer.version} is offered as a change; a follower takes whole versions")
        self._receiver.stop()
        with self._turn:
            slot, self._arrived = self._ring.spare, None
            if self._shared and transport_of_offer(offer).shares_memory:
                self.slots[slot].copy_(self._shared[offer.slot])
            else:
                self._receiver.target = self.slots[slot]
                self._receiver.receive(offer)
            self._arrived = (offer.version, slot)

    def use(self, update: Update) -> Update:
        """``update.version`` was received: the version to be used from now on, and its slot here."""
        if self._arrived != (update.version, self._ring.spare):
            raise SyncError(f"version {update.version} was not received")
        self._arrived = None
        return self._ring.put(update.version)

    def stop(self) -> None:
        """Give up the receive that is under way."""
        self._receiver.stop()


class _IntoSpare(WeightReceiver):
    """A receiver that has ``target`` for both its slots."""

    target: torch.Tensor

    @property
    def slots(self) -> Sequence[torch.Tensor]:
        return (self.target, self.target)
