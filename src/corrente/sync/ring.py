"""A follower's end of every transport: what is offered is fetched into the spare slot of many. See following.py.

Where learner and engines share memory, a version lies there only until the next but one is written: it is copied out.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from corrente.errors import SyncError
from corrente.sync.base import InPlace, Offer, Update
from corrente.sync.inbox import Inbox
from corrente.sync.lagged import VersionRing
from corrente.sync.layout import Layout


class Ring:
    """``slots``: uint8, (layout.nbytes,) each, lag + 2 of them on ``device``, for the engine that uses them. ``shared``: the two
    that the learner writes into, where there are any in this process; other offers are fetched as an engine fetches them."""

    def __init__(self, layout: Layout, *, lag: int, shared: Sequence[torch.Tensor] = (), device: str = "cpu") -> None:
        self._shelf, self._shared = VersionRing(lag), shared
        count = self._shelf.slots
        self.slots = [torch.zeros(layout.nbytes, dtype=torch.uint8, device=device) for _ in range(count)]
        self._inbox = _Into(layout)
        self._arrived: tuple[int, int] | None = None
        self._turn = threading.Lock()

    def receive(self, offer: Offer) -> None:
        """Have what is offered in the spare slot. Blocks: call it from a thread beside the one that computes. SyncError when it
        could not be had."""
        if offer.base is not None:
            raise SyncError(f"version {offer.version} is offered as a change; a follower takes whole versions")
        self._inbox.stop()
        with self._turn:
            slot, self._arrived = self._shelf.spare, None
            if isinstance(offer, InPlace) and self._shared:
                self.slots[slot].copy_(self._shared[offer.slot])
            else:
                self._inbox.target = self.slots[slot]
                self._inbox.receive(offer)
            self._arrived = (offer.version, slot)

    def take_up(self, update: Update) -> Update:
        """``update.version`` was received: the version to be used from now on, and its slot here."""
        if self._arrived != (update.version, self._shelf.spare):
            raise SyncError(f"version {update.version} was not received")
        self._arrived = None
        return self._shelf.put(update.version)

    def stop(self) -> None:
        """Give up the receive that is under way."""
        self._inbox.stop()


class _Into(Inbox):
    """An inbox that has ``target`` for both its slots."""

    target: torch.Tensor

    @property
    def slots(self) -> Sequence[torch.Tensor]:
        return (self.target, self.target)
