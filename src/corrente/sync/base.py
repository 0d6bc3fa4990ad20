"""How the bytes of version v reach the engines: staged while generation goes on, then flipped."""

from __future__ import annotations

from typing import Literal, Protocol

import msgspec

from corrente.types import Metrics


class Update(msgspec.Struct, frozen=True, kw_only=True):
    """Weights of ``version``, staged where the engine can see them: buffer ``slot`` of the channel they share."""

    version: int
    slot: int
    nbytes: int = 0


class Flip(msgspec.Struct, frozen=True, kw_only=True):
    """What a flip cost: the longest pause of any engine, in seconds."""

    pause_s: float


class Sync(Protocol):
    """Contract.

    - ``stage`` copies the learner's present weights, labels them ``version`` and returns when the copy is complete; the
      learner may then change its own. Generation goes on meanwhile. At most one update is staged and not yet flipped.
    - ``flip`` brings a staged update to every engine, or to none: on SyncError all engines hold the old version and the
      same update may be flipped again, or a new one staged.
    - Both may be cancelled; the old version then stays in use.
    """

    async def stage(self, version: int) -> Update: ...

    async def flip(self, update: Update, mode: Literal["swap", "recompute"]) -> Flip: ...

    def stats(self) -> Metrics: ...
