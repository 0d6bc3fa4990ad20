"""The policy of some versions ago, kept at hand while the run goes on: which versions are kept where, and how they get there.

    VersionRing      says which slot a follower fills next, and which version it uses: ``lag`` behind the newest that it has
    LaggedSync       is a Sync around another: each version that goes live is also brought to a follower, beside the pipeline
    LaggedReceiver   is the follower's memory (lagged_receiver.py)

A follower is a Receiver with lag + 2 slots of its own: lag + 1 versions that it has, and room for the next. It fetches while it
serves, and changes to another version between two calls. The next delivery waits for it when it has not fetched the live version
by then: once that delivery was flipped to, the learner may overwrite what the follower still reads. The learner itself does not
wait. A version that could not be brought is skipped with a warning: the follower then uses an older one, and says so.
"""

from __future__ import annotations

from collections.abc import Callable

import anyio

from corrente.common.waiting import Condition
from corrente.data.types import ApplyMode, Metrics
from corrente.errors import SyncError
from corrente.sync.base import Flip, Receiver, Sync, Update

TRIES = 3
"""Attempts at bringing one version to a follower."""


class VersionRing:
    """The order of lag + 2 slots. ``spare`` is the one to be filled next; ``put`` says which version is whole there, and returns
    the version to be used from now on, as an Update of its slot."""

    def __init__(self, lag: int) -> None:
        if lag < 1:
            raise SyncError(f"a follower of lag {lag}: it must be at least 1")
        self._lag = lag
        self._recent: list[Update] = []

    @property
    def slots(self) -> int:
        return self._lag + 2

    @property
    def spare(self) -> int:
        taken = {update.slot for update in self._recent}
        return next(slot for slot in range(self.slots) if slot not in taken)

    @property
    def used(self) -> Update | None:
        """The result of the last ``put``."""
        return self._recent[0] if self._recent else None

    def put(self, version: int) -> Update:
        """``version`` is whole in the spare slot. Returns the newest that is at least ``lag`` behind it, else the oldest."""
        newest = self._recent[-1].version if self._recent else -1
        if version > newest:
            self._recent.append(Update(version=version, slot=self.spare))
        old_enough = [at for at, update in enumerate(self._recent) if update.version <= version - self._lag]
        self._recent = self._recent[old_enough[-1] if old_enough else 0 :]
        return self._recent[0]


class LaggedSync:
    """Implements Sync. ``run`` must be running. ``log_event`` reports versions that the follower missed.

    ``before_export``: wait for the follower before an export, and not before a delivery. It is for a learner in this process,
    whose steps stop the event loop and the follower with it.
    """

    def __init__(
        self, inner: Sync, follower: Receiver, *, log_event: Callable[[str, str], None], before_export: bool = False
    ) -> None:
        self._inner, self._follower, self._log_event = inner, follower, log_event
        self._before_export = before_export
        self._live = self._settled = -1
        self._changed = Condition()
        self._missed = 0
        self._waited_s = 0.0

    async def run(self) -> None:
        """Bring each live version to the follower, until cancelled."""
        while True:
            await self._changed.wait_for(lambda: self._settled < self._live)
            version = self._live
            await self._bring(version)
            self._settled = version
            self._changed.notify_all()

    async def _bring(self, version: int) -> None:
        failure = ""
        for attempt in range(TRIES):
            await anyio.sleep(0.1 * (2**attempt - 1))
            try:
                return await self._inner.catch_up(self._follower)
            except SyncError as error:
                failure = f"version {version} did not reach the follower: {error}"
        self._missed += 1
        self._log_event("warning", failure)

    async def export(self, version: int) -> None:
        """See Sync.export."""
        if self._before_export:
            await self._wait_for_follower()
        await self._inner.export(version)

    async def deliver(self, version: int) -> Update:
        """See Sync.deliver."""
        if not self._before_export:
            await self._wait_for_follower()
        return await self._inner.deliver(version)

    async def _wait_for_follower(self) -> None:
        """Return when the follower has the live version, or was found unable to get it."""
        began = anyio.current_time()
        await self._changed.wait_for(lambda: self._settled >= self._live)
        self._waited_s = anyio.current_time() - began

    async def flip(self, update: Update, mode: ApplyMode) -> Flip:
        """See Sync.flip. The first returns when the follower has that version too, or was found unable to get it: before that it
        could serve nobody."""
        first = self._live < 0
        flip = await self._inner.flip(update, mode)
        self._live = update.version
        self._changed.notify_all()
        if first:
            await self._changed.wait_for(lambda: self._settled >= self._live)
        return flip

    async def catch_up(self, receiver: Receiver) -> None:
        """See Sync.catch_up."""
        await self._inner.catch_up(receiver)

    def stats(self) -> Metrics:
        """The numbers of the sync within; versions that the follower missed, and seconds that the last delivery waited for it."""
        return {
            **self._inner.stats(),
            "publish/follower_missed": float(self._missed),
            "publish/follower_wait_s": self._waited_s,
        }
