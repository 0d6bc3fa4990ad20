"""A virtual sync: weights take their time from the learner to the engines, and go wrong on the way where they are told to."""

from __future__ import annotations

import math
from collections.abc import Generator
from contextlib import contextmanager

import anyio

from corrente.data.types import ApplyMode, Metrics
from corrente.errors import SyncError
from corrente.sim.distributions import Distribution, Fixed, generator
from corrente.sim.engine import VirtualEngine
from corrente.sim.faults import Chaos
from corrente.sim.pool import VirtualPool
from corrente.sync.base import Flip, Receiver, Update
from corrente.sync.offers import Offer, SharedOffer

_NOTHING = Fixed(0.0)
_TENTH = Fixed(0.1)


class VirtualSync:
    """Takes ``export_s`` to export and ``deliver_s`` to deliver; a flip brings every engine to the new version, or none.

    ``shared``: the export goes to the engines' own spare slots, and waits until they are free, as in shared memory; otherwise the
    delivery does. ``deadline_s``: of an export, a delivery or a flip, once slots are free; past it that has failed.
    """

    def __init__(
        self,
        engine: VirtualEngine | VirtualPool,
        *,
        export_s: Distribution = _NOTHING,
        deliver_s: Distribution = _TENTH,
        shared: bool = False,
        deadline_s: float = math.inf,
        nbytes: int = 0,
        seed: int = 0,
        chaos: Chaos | None = None,
    ) -> None:
        self._engine = engine
        self._export_s, self._deliver_s = export_s, deliver_s
        self._shared, self._deadline_s = shared, deadline_s
        self._nbytes = nbytes
        self._seed = seed
        self._chaos = chaos or Chaos(seed=seed)
        self._live: Update | None = None
        self._exported: int | None = None
        self._lock = anyio.Lock()
        self.published: list[tuple[int, float]] = []
        """(version, when it was live everywhere), in order."""

    async def export(self, version: int) -> None:
        """AssertionError when the version before is not live yet: at most one exported version may wait for its flip."""
        live = self._live
        assert live is None or version == live.version + 1, f"version {version} was exported while {live} is live"
        self._exported = None
        if self._shared:
            await self._engine.reserve(self._slot)
        with self._deadline(f"version {version} was not exported"):
            await self._chaos.strike("export", str(version), SyncError)
            await anyio.sleep(self._export_s.draw(generator(self._seed, "export", version)))
        self._exported = version

    async def deliver(self, version: int) -> Update:
        if version != self._exported:
            raise SyncError(f"version {version} is to be delivered, and {self._exported} is exported")
        slot = self._slot
        if not self._shared:
            await self._engine.reserve(slot)
        async with self._lock:
            with self._deadline(f"version {version} was not with every engine"):
                await self._chaos.strike("deliver", str(version), SyncError)
                await anyio.sleep(self._deliver_s.draw(generator(self._seed, "deliver", version)))
                await self._engine.receive(self._offer(version, slot))
        return Update(version=version, slot=slot, nbytes=self._nbytes)

    async def flip(self, update: Update, mode: ApplyMode) -> Flip:
        async with self._lock:
            with self._deadline(f"version {update.version} was not applied"):
                await self._chaos.strike("flip", str(update.version), SyncError)
                pause_s = await self._engine.apply(update, mode)
            self._live, self._exported = update, None
            self.published.append((update.version, anyio.current_time()))
        return Flip(pause_s=pause_s)

    async def catch_up(self, receiver: Receiver) -> None:
        async with self._lock:
            live = self._live
            if live is None:
                raise SyncError("no version is live yet")
            slots = (live.slot,)
            try:
                await receiver.reserve(live.slot)
            except SyncError:  # an old version is looked at there: lead the engine to its other slot first
                slots = (1 - live.slot, live.slot)
            for slot in slots:
                await receiver.reserve(slot)
                await anyio.sleep(self._deliver_s.draw(generator(self._seed, "deliver", live.version)))
                await receiver.receive(self._offer(live.version, slot))
                await receiver.apply(Update(version=live.version, slot=slot, nbytes=self._nbytes), "swap")

    def stats(self) -> Metrics:
        return {"publish/bytes": float(self._nbytes)}

    @contextmanager
    def _deadline(self, complaint: str) -> Generator[None]:
        with anyio.move_on_after(self._deadline_s) as scope:
            yield
        if scope.cancelled_caught:
            raise SyncError(f"{complaint} within {self._deadline_s:g} s")

    @property
    def _slot(self) -> int:
        return 0 if self._live is None else 1 - self._live.slot

    def _offer(self, version: int, slot: int) -> Offer:
        return SharedOffer(version=version, slot=slot, nbytes=self._nbytes)
