"""Weights through memory that learner and engine share: a publish copies once, a flip copies nothing.

The learner, in its process, writes version v + 1 into the spare slot in the layout the engine wants, while the engine goes on
decoding from the other; then the engine, between two decode steps, points its tensors at the new slot. One host only, and host
memory: an engine on a GPU copies from there into slots of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from corrente.errors import SyncError
from corrente.sync.base import InPlace, Order
from corrente.sync.inbox import Delivery
from corrente.sync.layout import Layout
from corrente.sync.memory import map_path
from corrente.sync.outbox import Packed


class Shared:
    """The learner's half: what was packed is where the engines look. ``path``: where others can open the memory."""

    device = "cpu"

    def __init__(self, *, path: str = "") -> None:
        self._path = path

    def offer(self, order: Order, new: Packed, base: Packed | None) -> InPlace:
        return InPlace(version=order.version, slot=order.slot, nbytes=new.bytes.nbytes, path=self._path)

    def quiet(self, slot: int) -> None:
        return

    def close(self) -> None:
        return


class Copy:
    """The engine's half where it has slots of its own: copy from the memory that the offer names, mapped once."""

    on_host = False

    def __init__(self) -> None:
        self._mapped: tuple[str, Sequence[torch.Tensor]] = ("", ())

    def fetch(self, offer: InPlace, delivery: Delivery) -> None:
        if not offer.path:
            raise SyncError(f"version {offer.version} lies in memory that no other process can open")
        if self._mapped[0] != offer.path:
            self._mapped = (offer.path, map_slots(offer.path, delivery.layout))
        delivery.target.copy_(self._mapped[1][offer.slot])

    def close(self) -> None:
        self._mapped = ("", ())


def map_slots(path: str, layout: Layout) -> Sequence[torch.Tensor]:
    """The two slots of the run whose memory is at ``path``, as uint8 tensors that share it. SyncError when it is not there."""
    return [torch.frombuffer(slot, dtype=torch.uint8) for slot in map_path(path, layout.nbytes)]
