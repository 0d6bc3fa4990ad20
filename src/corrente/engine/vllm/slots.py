"""Where what is offered lies once it was received: the two slots of whoever receives. Needs torch."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from corrente.sync.base import InPlace, Offer
from corrente.sync.layout import Layout

INBOX, MEMORY = "corrente.sync.inbox", "corrente.sync.memory"
"""The engine's end of every transport; named, not imported, as everywhere between an engine and a transport."""


class Slots:
    """Two slots of its own, on ``device``, or those of a run's shared memory once an offer says where these are."""

    def __init__(self, layout: Layout, *, device: torch.device | None = None) -> None:
        self._layout = layout
        self._make: Any = import_module(INBOX).Inbox
        on_host = device is None or device.type == "cpu"
        own = None if on_host else [torch.zeros(layout.nbytes, dtype=torch.uint8, device=device) for _ in range(2)]
        self._inbox: Any = self._make(layout, own)
        self._memory = ""

    def receive(self, offer: Offer) -> torch.Tensor:
        """Have what is offered whole in its slot, and return that. Blocks. SyncError as Inbox.receive."""
        if isinstance(offer, InPlace) and offer.path != self._memory:
            first, second = import_module(MEMORY).map_path(offer.path, self._layout.nbytes)
            slots = torch.frombuffer(first, dtype=torch.uint8), torch.frombuffer(second, dtype=torch.uint8)
            self._inbox, self._memory = self._make(self._layout, slots, shared=True), offer.path
        self._inbox.receive(offer)
        return self._inbox.slots[offer.slot]

    def stop(self) -> None:
        """Give up what is under way; it ends soon, with SyncError."""
        self._inbox.stop()


def views(layout: Layout, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
    """Every slab where it lies in ``buffer``; nothing is copied."""
    return {
        slab.name: buffer[slab.offset : slab.offset + slab.nbytes].view(getattr(torch, slab.dtype)).view(slab.shape)
        for slab in layout.slabs
    }
