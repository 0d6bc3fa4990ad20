"""The engine's end of every transport: what is offered is fetched into a slot, checked, and only then said to be there.

``Inbox(layout, slots).receive(offer)`` is all of it; it needs torch, numpy and msgspec and nothing else of corrente's runtime, so
that it also runs inside the process of a foreign engine. It blocks: call it from a thread beside the one that decodes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec
import torch

from corrente.common.imports import load_object
from corrente.errors import SyncError
from corrente.sync import base
from corrente.sync.layout import Layout

FETCHERS: dict[type, str] = {
    base.InPlace: "corrente.sync.shm:Copy",
    base.OnDisk: "corrente.sync.disk:DiskFetcher",
    base.OverHttp: "corrente.sync.http:HttpFetcher",
    base.CollectiveOffer: "corrente.sync.collective:CollectiveFetcher",
    base.CudaIpcOffer: "corrente.sync.cuda_ipc:CudaIpcFetcher",
}


class Delivery(msgspec.Struct, frozen=True):
    """Where a fetcher puts what it fetches: ``target``, uint8 (layout.nbytes,). ``base`` is the version held, for a change.

    ``remaining_s`` says how much time is left; it raises SyncError when there is none, or when nobody waits any more. A fetcher
    asks it between two pieces, so that giving up is quick.
    """

    layout: Layout
    target: torch.Tensor
    base: torch.Tensor | None
    remaining_s: Callable[[], float]


class ReceiverTransport(Protocol):
    """The engine's half of a transport. ``fetch`` returns when the version offered is whole in its target; it raises SyncError,
    or whatever went wrong. ``on_host``: it writes to host memory, and a slot elsewhere is filled from a copy."""

    on_host: bool

    def fetch(self, offer: Any, delivery: Delivery) -> None: ...

    def close(self) -> None: ...


class Inbox:
    """Two slots for ``layout``, and what lies in them. ``slots``: zeroed uint8 tensors of layout.nbytes on the engine's device;
    None: made on the host when first needed. ``shared``: the learner writes into them itself."""

    def __init__(self, layout: Layout, slots: Sequence[torch.Tensor] | None = None, *, shared: bool = False) -> None:
        self._layout, self._given, self._shared = layout, slots, shared
        self._versions: list[int | None] = [None, None]
        self._fetchers: dict[type, ReceiverTransport] = {}
        self._host: torch.Tensor | None = None
        self._turn = threading.Lock()
        self._stop = threading.Event()

    @property
    def slots(self) -> Sequence[torch.Tensor]:
        if self._given is None:
            self._given = [torch.zeros(self._layout.nbytes, dtype=torch.uint8) for _ in range(2)]
        return self._given

    def holds(self, slot: int) -> int | None:
        """The version that is whole in ``slot``; None when there is none."""
        return self._versions[slot]

    def receive(self, offer: base.Offer) -> None:
        """Have what is offered in its slot. SyncError when it could not be had: that slot then holds nothing.

        One at a time: a receive that is under way is given up for this one.
        """
        self._stop.set()
        stop = self._stop = threading.Event()
        until = time.monotonic() + offer.deadline_s
        with self._turn:
            self._versions[offer.slot] = None
            held = self._versions[1 - offer.slot]
            if offer.base is not None and offer.base != held:
                raise SyncError(
                    f"version {offer.version} is a change of version {offer.base}; this engine holds {held}"
                )
            try:
                self._fetch(offer, lambda: _remaining_s(until, stop, offer))
            except SyncError:
                raise
            except Exception as error:
                raise SyncError(f"version {offer.version} did not arrive: {type(error).__name__}: {error}") from error
            self._versions[offer.slot] = offer.version

    def stop(self) -> None:
        """Give up the receive that is under way, if there is one; it raises SyncError in its thread soon."""
        self._stop.set()

    def close(self) -> None:
        """Give up what is under way, wait until it ended, and let go of connections."""
        self.stop()
        with self._turn:
            for fetcher in self._fetchers.values():
                fetcher.close()
            self._fetchers.clear()

    def _fetch(self, offer: base.Offer, remaining_s: Callable[[], float]) -> None:
        if self._shared and isinstance(offer, base.InPlace):
            return
        fetcher = self._fetchers.get(type(offer))
        if fetcher is None:
            fetcher = self._fetchers[type(offer)] = load_object(FETCHERS[type(offer)])()
        slot = self.slots[offer.slot]
        bounce = fetcher.on_host and slot.device.type != "cpu"
        target = self._bounce() if bounce else slot
        held = self.slots[1 - offer.slot] if offer.base is not None else None
        old = held.cpu() if held is not None and bounce else held
        remaining_s()
        fetcher.fetch(offer, Delivery(self._layout, target, old, remaining_s))
        if bounce:
            slot.copy_(target)

    def _bounce(self) -> torch.Tensor:
        """Host memory on the way to an accelerator, pinned where that can be."""
        if self._host is None:
            pin = torch.cuda.is_available()
            self._host = torch.zeros(self._layout.nbytes, dtype=torch.uint8, pin_memory=pin)
        return self._host


def _remaining_s(until: float, stop: threading.Event, offer: base.Offer) -> float:
    if stop.is_set():
        raise SyncError(f"version {offer.version} was given up while it was fetched")
    remaining_s = until - time.monotonic()
    if remaining_s <= 0:
        raise SyncError(f"version {offer.version} was not fetched within {offer.deadline_s:g} s; see sync.deadline_s")
    return remaining_s
