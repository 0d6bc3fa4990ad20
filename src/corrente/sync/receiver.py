"""The engine's half of every transport: what is offered is fetched into a slot and checked, and only then counts as held.

``WeightReceiver(layout, slots).receive(offer)`` is all of it. It needs torch, numpy and msgspec and nothing of corrente's
runtime, so it also runs inside the process of a foreign engine. It blocks: call it from a thread beside the one that decodes.
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
from corrente.sync.kinds import transport_of_offer
from corrente.sync.layout import Layout
from corrente.sync.offers import Offer
from corrente.sync.weight_slots import SLOTS, allocate_slots, map_slots


class ReceiveTarget(msgspec.Struct, frozen=True):
    """The place for what is fetched: ``target``, uint8 (layout.nbytes,). ``base``: the version held, for a change of it.

    With one slot ``base`` is ``target`` itself. ``remaining_s`` says how much time is left; it raises SyncError when there is
    none, or when nobody waits any more. A receiver asks it between two pieces, so that giving up is quick.
    """

    layout: Layout
    target: torch.Tensor
    base: torch.Tensor | None
    remaining_s: Callable[[], float]


class ReceiverTransport(Protocol):
    """The engine's half of one transport. ``fetch`` returns when the version offered is whole in its target; it raises SyncError,
    or whatever went wrong. ``on_host``: it writes to host memory, and a slot elsewhere is filled from a copy."""

    on_host: bool

    def fetch(self, offer: Any, into: ReceiveTarget) -> None: ...

    def close(self) -> None: ...


class WeightReceiver:
    """The slots of one engine, and the versions that lie in them.

    ``slots``: zeroed uint8 tensors of layout.nbytes on the engine's device; None: ``count`` on the host, made when first needed.
    ``shared``: the learner writes into them itself. ``adopt``: take the memory of a run for slots once an offer says where it is,
    for an engine in a process that did not inherit it.
    """

    def __init__(
        self,
        layout: Layout,
        slots: Sequence[torch.Tensor] | None = None,
        *,
        shared: bool = False,
        adopt: bool = False,
        count: int = SLOTS,
    ) -> None:
        self._layout, self._slots, self._shared, self._adopt = layout, slots, shared, adopt
        self._count = count if slots is None else len(slots)
        self._adopted = ""
        self.versions: list[int | None] = [None] * self._count
        self._transports: dict[type, ReceiverTransport] = {}
        self._host: torch.Tensor | None = None
        self._turn = threading.Lock()
        self._stop = threading.Event()

    @property
    def slots(self) -> Sequence[torch.Tensor]:
        if self._slots is None:
            self._slots = allocate_slots(self._layout, count=self._count)
        return self._slots

    def holds(self, slot: int) -> int | None:
        """The version that is whole in ``slot``; None when there is none."""
        return self.versions[slot]

    def receive(self, offer: Offer) -> None:
        """Have what is offered in its slot. SyncError when it could not be had: that slot then holds nothing.

        One at a time: a receive that is under way is given up for this one.
        """
        self._stop.set()
        stop = self._stop = threading.Event()
        until = time.monotonic() + offer.deadline_s
        with self._turn:
            held = self.versions[self._base_slot(offer)]
            self.versions[offer.slot] = None
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
            self.versions[offer.slot] = offer.version

    @property
    def is_receiving(self) -> bool:
        """True while a receive is under way in another thread."""
        return self._turn.locked()

    def stop(self) -> None:
        """Give up the receive that is under way, if there is one; it raises SyncError in its thread soon."""
        self._stop.set()

    def close(self) -> None:
        """Give up what is under way, wait until it ended, and let go of connections."""
        self.stop()
        with self._turn:
            for transport in self._transports.values():
                transport.close()
            self._transports.clear()

    def _base_slot(self, offer: Offer) -> int:
        """The slot of the version held when ``offer`` comes: the other one, or the only one."""
        return (offer.slot + 1) % self._count

    def _fetch(self, offer: Offer, remaining_s: Callable[[], float]) -> None:
        kind = transport_of_offer(offer)
        if kind.shares_memory and self._is_shared(offer):
            return
        if not kind.receiver:
            raise SyncError(f"version {offer.version} is offered by {kind.kind}, which the engine's own code receives")
        transport = self._transports.get(type(offer))
        if transport is None:
            transport = self._transports[type(offer)] = load_object(kind.receiver)()
        slot = self.slots[offer.slot]
        bounce = transport.on_host and slot.device.type != "cpu"
        target = self._bounce() if bounce else slot
        held = self.slots[self._base_slot(offer)] if offer.base is not None else None
        old = held.cpu() if held is not None and bounce else held
        remaining_s()
        transport.fetch(offer, ReceiveTarget(self._layout, target, old, remaining_s))
        if bounce:
            slot.copy_(target)

    def _is_shared(self, offer: Any) -> bool:
        """True when the learner wrote into these very slots; those of a run's memory are mapped first, where they are wanted."""
        if self._adopt and offer.path != self._adopted:
            self._slots = map_slots(self._layout, path=offer.path, count=self._count)
            self._adopted = offer.path
        return self._shared or self._adopt

    def _bounce(self) -> torch.Tensor:
        """Host memory on the way to an accelerator, pinned where that can be."""
        if self._host is None:
            pin = torch.cuda.is_available()
            self._host = torch.zeros(self._layout.nbytes, dtype=torch.uint8, pin_memory=pin)
        return self._host


def _remaining_s(until: float, stop: threading.Event, offer: Offer) -> float:
    if stop.is_set():
        raise SyncError(f"version {offer.version} was given up while it was fetched")
    remaining_s = until - time.monotonic()
    if remaining_s <= 0:
        raise SyncError(f"version {offer.version} was not fetched within {offer.deadline_s:g} s; see sync.deadline_s")
    return remaining_s
