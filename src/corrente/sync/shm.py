"""Weights through memory that learner and engine share: a publish copies once, a flip copies nothing.

The learner, in its process, writes version v + 1 into the spare slot in the layout the engine wants, while the engine goes on
decoding from the other; then the engine, between two decode steps, points its tensors at the new slot. One host only, and host
memory: an engine on a GPU copies from there into slots of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from corrente.errors import SyncError
from corrente.sync.base import OfferRequest
from corrente.sync.offers import SharedOffer
from corrente.sync.receiver import ReceiveTarget
from corrente.sync.sender import PackedVersion, SenderSetup
from corrente.sync.weight_slots import map_slots


class SharedSender:
    """The learner's half: what was exported is where the engines look. There is nothing to move."""

    device = "cpu"

    def __init__(self, section: Any, setup: SenderSetup) -> None:
        self._path = setup.path

    def offer(
        self, request: OfferRequest, new: PackedVersion, base: PackedVersion | None, *, check: Callable[[], None]
    ) -> SharedOffer:
        return SharedOffer(version=request.version, slot=new.slot, nbytes=new.bytes.nbytes, path=self._path)

    def release(self, slot: int) -> None:
        return

    def close(self) -> None:
        return


class SharedReceiver:
    """The engine's half where it has slots of its own: copy from the memory that the offer names, mapped once."""

    on_host = False

    def __init__(self) -> None:
        self._mapped: tuple[str, Sequence[torch.Tensor]] = ("", ())

    def fetch(self, offer: SharedOffer, into: ReceiveTarget) -> None:
        if not offer.path:
            raise SyncError(f"version {offer.version} lies in memory that no other process can open")
        if self._mapped[0] != offer.path:
            self._mapped = (offer.path, map_slots(into.layout, path=offer.path))
        into.target.copy_(self._mapped[1][offer.slot])

    def close(self) -> None:
        self._mapped = ("", ())
