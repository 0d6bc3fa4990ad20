"""The transaction that every two-buffer sync shares: write into the spare slot, flip, and the slots change places.

Which slot is spare follows from what the engine last acknowledged, so an update can only be staged where the engine does not
look. What is written where, and how a flip reaches the engine, is the business of the transports built on this.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Literal

import anyio

from corrente.engine.base import Engine
from corrente.errors import SyncError
from corrente.sync.base import Flip, Update
from corrente.types import Metrics

Export = Callable[[int], Awaitable[float]]
"""Write the learner's present weights into a slot; returns the seconds it took. SyncError when it could not."""


class SlotSync:
    """Sync over two slots that a learner writes and an engine reads.

    A stage that fails or is cancelled leaves a half-written spare slot behind, which nobody reads and the next stage
    overwrites. Whether a flip that was cancelled happened is for the engine to say: the next stage asks it first, so that
    the learner never writes into a slot the engine looks at, or has yet to leave.
    """

    def __init__(self, *, engine: Engine, export: Export, nbytes: int) -> None:
        self._engine, self._export, self._nbytes = engine, export, nbytes
        self._live: Update | None = None
        self._staged: Update | None = None
        self._doubtful: Update | None = None
        self._stage_s = 0.0
        self._pause_s = 0.0

    async def stage(self, version: int) -> Update:
        """Copy the learner's weights into the spare slot; see Sync.stage."""
        self._staged = None
        slot = await self._spare()
        self._stage_s = await self._export(slot)
        self._staged = Update(version=version, slot=slot, nbytes=self._nbytes)
        return self._staged

    async def flip(self, update: Update, mode: Literal["swap", "recompute"]) -> Flip:
        """Make a staged update live; see Sync.flip."""
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
        return Flip(pause_s=self._pause_s)

    def stats(self) -> Metrics:
        """Cost of the last publish: bytes, seconds and bandwidth of the copy, milliseconds the engine paused."""
        bandwidth = self._nbytes / self._stage_s / 1e9 if self._stage_s > 0 else 0.0
        return {
            "publish/bytes": float(self._nbytes),
            "publish/stage_s": self._stage_s,
            "publish/bandwidth_gb_s": bandwidth,
            "publish/pause_ms": self._pause_s * 1e3,
        }

    async def _spare(self) -> int:
        """The slot the engine does not look at."""
        if self._doubtful is not None:
            held = (await self._engine.stats()).version
            if held == self._doubtful.version:
                self._live = self._doubtful
            self._doubtful = None
        return 0 if self._live is None else 1 - self._live.slot
