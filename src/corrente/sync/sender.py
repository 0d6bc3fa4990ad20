"""The learner's half of every transport: weights are copied into a slot, and offered from there beside the next step.

A learner has as many slots as an engine. With two, an export goes where the version before the live one was: the live version
stays on offer, for late engines and as the base of the next change.

Two threads meet here. ``export`` belongs to the thread that trains, ``offer`` to one beside it (runtime/learner_worker.py). An
offer reads exported slots and never the learner's parameters, so neither waits for the other, but for one case: a slot that is to
be written while an offer still reads it, which happens when a delivery was given up. The offer is told to end, and waited for.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch

from corrente.common.imports import load_object
from corrente.config import RunConfig
from corrente.errors import SyncError
from corrente.sync import pack
from corrente.sync.base import OfferRequest
from corrente.sync.kinds import transport_of
from corrente.sync.layout import Layout
from corrente.sync.offers import Offer
from corrente.sync.weight_slots import SLOTS, allocate_slots

RELEASE_S = 30.0
"""An export waits so long for an offer that was given up to leave its slot."""


class PackedVersion(msgspec.Struct, frozen=True):
    """One whole version in the learner's slot ``slot``, in the engine's layout: uint8, (layout.nbytes,)."""

    version: int
    slot: int
    bytes: torch.Tensor


class SenderSetup(msgspec.Struct, frozen=True, kw_only=True):
    """The surroundings of a sender: ``folder`` of the run's weights, and ``path`` of the memory shared with engines, if any."""

    layout: Layout
    folder: Path
    path: str = ""


class SenderTransport(Protocol):
    """The learner's half of one transport, built as ``make(section, setup)``.

    ``offer`` makes ``new`` available to ``request.members`` engines, as a change of ``base`` where that is given and the
    transport can. It may go on reading both after it returned, until ``release`` of their slot. It calls ``check`` between two
    pieces of work and lets pass what that raises, so that giving up is quick. Offers come one at a time, in a thread beside the
    learner's: on a GPU it uses a stream of its own, never the learner's.

    ``release`` returns when ``slot`` is read no more, having given up what is still under way. It is called by the learner's
    thread, possibly during an offer of another slot. What any of them raises is a SyncError. ``device``: where the slots have to
    be, "cpu" or "cuda".
    """

    device: str

    def offer(
        self, request: OfferRequest, new: PackedVersion, base: PackedVersion | None, *, check: Callable[[], None]
    ) -> Offer: ...

    def release(self, slot: int) -> None: ...

    def close(self) -> None: ...


class WeightSender:
    """Copies weights into slots, remembers which version lies where, and has them offered."""

    def __init__(self, *, layout: Layout, slots: Sequence[torch.Tensor], transport: SenderTransport) -> None:
        self._layout, self.slots, self.transport = layout, slots, transport
        self._versions: list[int | None] = [None] * len(slots)
        self._reading: set[int] = set()
        self._changed = threading.Condition()
        """Guards the two above."""
        self._turn = threading.Lock()
        """Held by the offer under way."""
        self._stop = threading.Event()

    def export(self, version: int, tensors: Mapping[str, torch.Tensor], *, slot: int) -> float:
        """Copy ``tensors``, the learner's by state-dict name, into ``slot``; seconds of the copy. See Sender.export."""
        with self._changed:
            self._versions[slot] = None
            if slot in self._reading:
                self._stop.set()
            if not self._changed.wait_for(lambda: slot not in self._reading, RELEASE_S):
                raise SyncError(f"slot {slot} is still read by an offer that was given up {RELEASE_S:g} s ago")
        self.transport.release(slot)
        start = time.perf_counter()
        pack.write(self._layout, tensors, self.slots[slot])
        copy_s = time.perf_counter() - start
        with self._changed:
            self._versions[slot] = version
        return copy_s

    def offer(self, request: OfferRequest) -> Offer:
        """Offer an exported version. The slot it lies in need not be the one it goes to. See Sender.offer.

        One at a time: an offer that is under way is given up for this one.
        """
        with self._changed:
            self._stop.set()
            stop = self._stop = threading.Event()
        with self._turn:
            with self._changed:
                if request.version not in self._versions:
                    raise SyncError(f"version {request.version} is not kept any more; the learner has {self._versions}")
                new, base = self._found(request)
                self._reading = {new.slot} | (set() if base is None else {base.slot})
            try:
                return self.transport.offer(request, new, base, check=lambda: _check(stop, request.version))
            finally:
                with self._changed:
                    self._reading = set()
                    self._changed.notify_all()

    def stop(self) -> None:
        """Give up the offer that is under way; it raises SyncError in its thread soon."""
        self._stop.set()

    def close(self) -> None:
        """Give up what is under way, wait until it ended, and let go of files and connections."""
        self.stop()
        with self._turn:
            self.transport.close()

    def _found(self, request: OfferRequest) -> tuple[PackedVersion, PackedVersion | None]:
        """The version asked for and, where a change is enough and its base is kept, that base."""
        at = request.slot if self._versions[request.slot] == request.version else self._versions.index(request.version)
        new = PackedVersion(request.version, at, self.slots[at])
        if (
            request.whole
            or request.live is None
            or request.live not in self._versions
            or request.live == request.version
        ):
            return new, None
        at = self._versions.index(request.live)
        return new, PackedVersion(request.live, at, self.slots[at])


def _check(stop: threading.Event, version: int) -> None:
    if stop.is_set():
        raise SyncError(f"version {version} was given up while it was offered")


def build(
    config: RunConfig,
    layout: Layout,
    *,
    shared: Sequence[torch.Tensor] | None = None,
    path: str = "",
    device: str = "cuda",
    slots: int = SLOTS,
) -> WeightSender:
    """The sender that a config asks for.

    ``shared``: slots that engines see as well, and ``path``, where others can open them; without them the sender makes ``slots``
    of its own. ``device``: the learner's, for a transport whose slots are on a GPU.
    """
    section: Any = config.sync
    folder = Path(config.run.dir).absolute() / config.run.name / "weights"
    make = load_object(transport_of(section).sender)
    transport: SenderTransport = make(section, SenderSetup(layout=layout, folder=folder, path=path))
    if shared is None:
        where = device if transport.device == "cuda" else "cpu"
        shared = allocate_slots(layout, device=where, count=slots)
    return WeightSender(layout=layout, slots=shared, transport=transport)
