"""The transaction that every transport shares: reserve the spare slot, fill it, flip, and the slots change places.

Which slot is spare follows from what the engine last acknowledged, so an update can only be brought where the engine does not
look, and only what every engine acknowledged is ever the base of a change. How bytes get into a slot is the business of the
transports (outbox.py and inbox.py); this end lives in the controller and touches no byte.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import anyio

from corrente.config import Disk, Http, Inproc, Shm
from corrente.data.types import ApplyMode, Metrics
from corrente.errors import SyncError
from corrente.sync.base import Flip, Offer, Order, Receiver, Sender, Update, VersionedReceiver


class SlotSync:
    """Sync over two slots of every engine. ``shared``: the slots are memory that the learner writes into itself.

    ``anchor_every`` 0 ships every version whole; N ships what changed, but every Nth version, and the one after a failure, whole.
    A stage that fails or is cancelled leaves a half-written spare slot behind, which nobody reads and the next stage
    overwrites. Whether a flip that was cancelled happened is for the engine to say: the next stage asks it first, so that
    nobody writes into a slot the engine looks at, or has yet to leave.
    """

    def __init__(
        self,
        *,
        engine: VersionedReceiver,
        sender: Sender,
        shared: bool = False,
        anchor_every: int = 0,
        deadline_s: float = math.inf,
    ) -> None:
        self._engine, self._sender = engine, sender
        self._shared, self._anchor_every, self._deadline_s = shared, anchor_every, deadline_s
        self._lock = anyio.Lock()
        self._live: Update | None = None
        self._staged: Update | None = None
        self._doubtful: Update | None = None
        self._since_whole, self._whole = 0, True
        self._stage_s = self._copy_s = self._pause_s = 0.0
        self._nbytes = 0

    async def stage(self, version: int) -> Update:
        """Bring the learner's weights into the spare slot of every engine; see Sync.stage."""
        self._staged = None
        slot = await self._spare()
        await self._engine.reserve(slot)
        async with self._lock:
            began = anyio.current_time()
            order = self._order(version, slot)
            self._whole = True
            with self._deadline(f"version {version} was not with every engine"):
                exported = await self._sender.export(order)
                await self._engine.receive(exported.offer)
            self._account(exported.offer, exported.copy_s, anyio.current_time() - began)
            self._staged = Update(version=version, slot=slot, nbytes=exported.offer.nbytes)
            return self._staged

    async def flip(self, update: Update, mode: ApplyMode) -> Flip:
        """Make a staged update live; see Sync.flip."""
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
            self._live, self._staged, self._doubtful = update, None, None
            self._whole = False
            return Flip(pause_s=self._pause_s)

    async def catch_up(self, receiver: Receiver) -> None:
        """Bring the live version to an engine that missed it; see Sync.catch_up. SyncError when no version is live yet."""
        async with self._lock:
            live = self._live
            if live is None:
                raise SyncError("no version is live yet: there is nothing to catch up with")
            with self._deadline(f"version {live.version} was not with the late engine"):
                for slot in (live.slot,) if self._shared else await _steps(receiver, live.slot):
                    await self._bring(receiver, live.version, slot)

    async def _bring(self, receiver: Receiver, version: int, slot: int) -> None:
        """The live version, whole, into one slot of ``receiver``, and used from there. Shared memory holds it already, and an
        engine that missed versions may look at it: nothing is written."""
        if not self._shared:
            await receiver.reserve(slot)
        members = receiver.members()
        offer: Offer = await self._sender.again(Order(version=version, slot=slot, live=version, members=members))
        await receiver.receive(offer)
        await receiver.apply(Update(version=version, slot=slot, nbytes=offer.nbytes), "swap")

    def stats(self) -> Metrics:
        """Cost of the last publish: bytes moved, seconds in all and of the copy out of the learner, bandwidth of the whole
        stage, milliseconds the engine paused, and whether it was shipped whole."""
        bandwidth = self._nbytes / self._stage_s / 1e9 if self._stage_s > 0 else 0.0
        return {
            "publish/bytes": float(self._nbytes),
            "publish/stage_s": self._stage_s,
            "publish/copy_s": self._copy_s,
            "publish/bandwidth_gb_s": bandwidth,
            "publish/pause_ms": self._pause_s * 1e3,
            "publish/whole": float(self._since_whole == 0),
        }

    def _order(self, version: int, slot: int) -> Order:
        """A change where everybody has its base and no anchor is due; all of it otherwise."""
        anchor = self._since_whole + 1 >= self._anchor_every
        whole = self._whole or anchor or self._live is None
        live = None if self._live is None else self._live.version
        return Order(version=version, slot=slot, live=live, whole=whole, members=self._engine.members())

    def _account(self, offer: Offer, copy_s: float, stage_s: float) -> None:
        self._nbytes, self._copy_s, self._stage_s = offer.nbytes, copy_s, stage_s
        self._since_whole = 0 if offer.base is None else self._since_whole + 1

    @contextmanager
    def _deadline(self, complaint: str) -> Generator[None]:
        with anyio.move_on_after(self._deadline_s) as scope:
            yield
        if scope.cancelled_caught:
            raise SyncError(f"{complaint} within {self._deadline_s:g} s; sync.deadline_s allows more")

    async def _spare(self) -> int:
        """The slot the engine does not look at."""
        if self._doubtful is not None:
            held = await self._engine.held()
            if held == self._doubtful.version:
                self._live = self._doubtful
            self._doubtful = None
        return 0 if self._live is None else 1 - self._live.slot


async def _steps(receiver: Receiver, slot: int) -> tuple[int, ...]:
    """The slots to fill, one after the other, until ``receiver`` uses ``slot``: one that looks at an old version there has to
    be led to its other slot first."""
    try:
        await receiver.reserve(slot)
    except SyncError:
        return 1 - slot, slot
    return (slot,)


def build(section: Any, *, engine: VersionedReceiver, sender: Sender) -> SlotSync:
    """The sync that a section of the config asks for, between an engine and a learner that are started."""
    delta = isinstance(section, Disk | Http) and section.payload == "delta"
    return SlotSync(
        engine=engine,
        sender=sender,
        shared=isinstance(section, Inproc | Shm),
        anchor_every=section.anchor_every if delta else 0,
        deadline_s=section.deadline_s,
    )
