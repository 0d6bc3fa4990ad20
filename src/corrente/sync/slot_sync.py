"""The transaction that every transport shares: export, reserve the spare slot, fill it, flip, and the slots change places.

The spare slot follows from what the engine last acknowledged, so an update can only be brought where the engine does not
look, and only what every engine acknowledged is ever the base of a change. How bytes get into a slot is the business of the
transports (sender.py and receiver.py); this end lives in the controller and touches no byte.

            shared memory                      otherwise
export      reserve, then copy into the        copy into a slot of the learner's own
            engines' slot
deliver     offer, receive (nothing moves)     reserve, offer, receive
"""

from __future__ import annotations

import math
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import anyio
import msgspec

from corrente.data.types import ApplyMode, Metrics
from corrente.errors import SyncError
from corrente.sync.base import Flip, OfferRequest, Receiver, Sender, Update, VersionedReceiver
from corrente.sync.kinds import transport_of


class _Exported(msgspec.Struct, frozen=True, kw_only=True):
    """A version in the learner's ``slot``. ``export_s``: what the learner waited for it; ``after_s``: of that, after the slot was
    reserved; ``copy_s``: of that, the copy itself."""

    version: int
    slot: int
    export_s: float
    after_s: float
    copy_s: float


class SlotSync:
    """Sync over one or two slots of every engine. ``shared``: the slots are memory that the learner writes into itself.

    ``anchor_every`` 0 ships every version whole; N ships what changed, but every Nth version, and the one after a failure, whole.
    A delivery that fails or is cancelled leaves a half-written spare slot behind, from which nobody samples and which the next
    one overwrites. Only the engine can tell if a flip that was cancelled happened: the next export asks it first, so that nobody
    writes into a slot the engine looks at, or has yet to leave.

    The learner has as many slots as an engine, so one exported version waits for its flip beside the live one, and no more: the
    next export needs the slot of the version before, which is free when the one in between is live. Whoever calls ``export``
    waits for that flip (controller/pipeline.py).

    ``slots`` = 1: the only slot is overwritten, so every engine stands still from ``reserve`` until a flip succeeds, and there is
    no old version to serve, to catch up with, or to change. Mode "snapshot" is refused. Policies that wait for requests to end
    have to do so before the slot is reserved.
    """

    def __init__(
        self,
        *,
        engine: VersionedReceiver,
        sender: Sender,
        shared: bool = False,
        anchor_every: int = 0,
        deadline_s: float = math.inf,
        slots: int = 2,
    ) -> None:
        assert slots in (1, 2), slots
        self._engine, self._sender = engine, sender
        self._shared, self._anchor_every, self._deadline_s, self._slots = shared, anchor_every, deadline_s, slots
        self._lock = anyio.Lock()
        """One transfer to engines at a time. Not held while a slot is waited for: that may take as long as a generation, and a
        late engine must not wait for it. Not taken by ``export``: the learner must not wait for a transfer."""
        self._live: Update | None = None
        self._exported: _Exported | None = None
        self._reserved = False
        self._staged: Update | None = None
        self._doubtful: Update | None = None
        self._since_whole, self._whole = 0, True
        self._export_s = self._deliver_s = self._stage_s = self._copy_s = self._pause_s = 0.0
        self._nbytes = 0

    async def export(self, version: int) -> None:
        """Copy the learner's weights into the spare slot; see Sync.export."""
        self._exported = self._staged = None
        began = anyio.current_time()
        slot = await self._spare()
        if self._shared:
            await self._reserve(slot)
        self._reserved = self._shared
        reserved = anyio.current_time()
        with self._deadline(f"version {version} was not exported"):
            copy_s = await self._sender.export(version, slot=slot)
        now = anyio.current_time()
        self._exported = _Exported(
            version=version, slot=slot, export_s=now - began, after_s=now - reserved, copy_s=copy_s
        )

    async def deliver(self, version: int) -> Update:
        """Bring the exported version into the spare slot of every engine; see Sync.deliver."""
        exported = self._exported
        if exported is None or exported.version != version:
            has = "nothing" if exported is None else f"version {exported.version}"
            raise SyncError(f"version {version} was to be delivered, but {has} is exported")
        self._staged = None
        if not self._reserved:
            await self._reserve(exported.slot)
        self._reserved = False
        async with self._lock:
            began = anyio.current_time()
            request = self._request(version, exported.slot)
            self._whole = True
            with self._deadline(f"version {version} was not with every engine"):
                offer = await self._sender.offer(request)
                await self._engine.receive(offer)
            self._export_s, self._copy_s = exported.export_s, exported.copy_s
            self._deliver_s = anyio.current_time() - began
            self._stage_s = exported.after_s + self._deliver_s
            self._nbytes = offer.nbytes
            self._since_whole = 0 if offer.base is None else self._since_whole + 1
            self._staged = Update(version=version, slot=exported.slot, nbytes=offer.nbytes)
            return self._staged

    async def flip(self, update: Update, mode: ApplyMode) -> Flip:
        """Make a delivered update live; see Sync.flip."""
        if self._slots == 1 and mode == "snapshot":
            raise SyncError('mode "snapshot" keeps the old weights for live sequences, which one slot has no room for')
        async with self._lock:
            if update != self._staged:
                staged = "nothing" if self._staged is None else f"version {self._staged.version}"
                raise SyncError(
                    f"version {update.version} in slot {update.slot} was to be flipped to, but {staged} is staged"
                )
            try:
                self._pause_s = await self._engine.apply(update, mode)
            except anyio.get_cancelled_exc_class():
                self._doubtful = update
                raise
            self._live, self._exported, self._staged, self._doubtful = update, None, None, None
            self._whole = False
            return Flip(pause_s=self._pause_s)

    async def catch_up(self, receiver: Receiver) -> None:
        """Bring the live version to an engine that missed it; see Sync.catch_up. SyncError when no version is live."""
        async with self._lock:
            live = self._live
            if live is None:
                raise SyncError("no version is live yet: there is nothing to catch up with")
            with self._deadline(f"version {live.version} was not with the late engine"):
                for slot in (live.slot,) if self._shared else await _steps(receiver, live.slot):
                    await self._bring(receiver, live.version, slot)

    async def _bring(self, receiver: Receiver, version: int, slot: int) -> None:
        """Bring the live version, whole, into one slot of ``receiver``, and have it used from there. Shared memory holds it
        already, and an engine that missed versions may look at it: nothing is written."""
        if not self._shared:
            await receiver.reserve(slot)
        members = receiver.members()
        offer = await self._sender.offer(OfferRequest(version=version, slot=slot, live=version, members=members))
        await receiver.receive(offer)
        await receiver.apply(Update(version=version, slot=slot, nbytes=offer.nbytes), "swap")

    def stats(self) -> Metrics:
        """The cost of the last version that was delivered: bytes moved, seconds, bandwidth, milliseconds the engine paused, and
        1 where it was shipped whole.

        ``export_s`` is what the learner waited, for a slot of shared memory too, ``copy_s`` the copy alone, ``deliver_s`` the
        transfer beside the learner; ``stage_s``, of which bandwidth is made, all but the waiting for slots.
        """
        bandwidth = self._nbytes / self._stage_s / 1e9 if self._stage_s > 0 else 0.0
        return {
            "publish/bytes": float(self._nbytes),
            "publish/stage_s": self._stage_s,
            "publish/export_s": self._export_s,
            "publish/copy_s": self._copy_s,
            "publish/deliver_s": self._deliver_s,
            "publish/bandwidth_gb_s": bandwidth,
            "publish/pause_ms": self._pause_s * 1e3,
            "publish/whole": float(self._since_whole == 0),
        }

    def _request(self, version: int, slot: int) -> OfferRequest:
        """Ask for a change where everybody has its base and no anchor is due; for the whole version otherwise."""
        anchor = self._since_whole + 1 >= self._anchor_every
        whole = self._whole or anchor or self._live is None
        live = None if self._live is None else self._live.version
        return OfferRequest(version=version, slot=slot, live=live, whole=whole, members=self._engine.members())

    async def _reserve(self, slot: int) -> None:
        if self._slots == 1:
            self._live = None  # its bytes are about to be overwritten
        await self._engine.reserve(slot)

    @contextmanager
    def _deadline(self, complaint: str) -> Generator[None]:
        with anyio.move_on_after(self._deadline_s) as scope:
            yield
        if scope.cancelled_caught:
            raise SyncError(f"{complaint} within {self._deadline_s:g} s; sync.deadline_s allows more")

    async def _spare(self) -> int:
        """The slot the engine does not look at, or its only one."""
        if self._doubtful is not None:
            held = await self._engine.held()
            if held == self._doubtful.version:
                self._live = self._doubtful
            self._doubtful = None
        return 0 if self._live is None else (self._live.slot + 1) % self._slots


async def _steps(receiver: Receiver, slot: int) -> tuple[int, ...]:
    """The slots to fill, one after the other, until ``receiver`` uses ``slot``: one that looks at an old version there has to
    be led to its other slot first."""
    try:
        await receiver.reserve(slot)
    except SyncError:
        return 1 - slot, slot
    return (slot,)


def build(section: Any, *, engine: VersionedReceiver, sender: Sender, slots: int = 2) -> SlotSync:
    """The sync that a section of the config asks for, between an engine and a learner that are started."""
    transport = transport_of(section)
    changes = transport.sends_changes and section.payload == "delta"
    return SlotSync(
        engine=engine,
        sender=sender,
        shared=transport.shares_memory,
        anchor_every=section.anchor_every if changes else 0,
        deadline_s=section.deadline_s,
        slots=slots,
    )
