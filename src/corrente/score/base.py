"""What an episode earned. Runs beside generation; one group's scoring never waits for another's.

Scorer   what the pipeline asks: a group in, the group with its rewards out
Source   one of the opinions that a reward is made of: a function, a model, a judge, a teacher. ``panel`` makes a Scorer of many
Mark     what a source says of one episode
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from corrente.data.types import Group, Metrics, StepScore, TeacherTurn


class ScoreResult(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A source's verdict on one episode. ``score`` None: it does not apply. ``error``: why it has none, where it is not empty.

    ``steps``, ``taught`` and ``extra`` are added to the episode's; ``metrics`` are numbers to be averaged and reported.
    """

    score: float | None = None
    error: str = ""
    steps: tuple[StepScore, ...] = ()
    taught: tuple[TeacherTurn, ...] = ()
    extra: dict[str, object] = {}
    metrics: dict[str, float] = {}


class Scorer(Protocol):
    """Contract.

    - ``score`` returns the group with ``scores`` and ``reward`` filled in, episodes in the same order. An episode whose scoring
      failed comes back with status "failed" or "timeout" and an error that names the function; the others keep their rewards.
    - Raises nothing but cancellation for a fault of a reward function.
    - Never blocks the event loop: synchronous functions run in a thread, or process, with a deadline.
    - ``stats``: per source, what waits and runs now, and latencies and failures since the start.
    """

    async def score(self, group: Group) -> Group: ...

    def stats(self) -> Metrics: ...


class Source(Protocol):
    """Contract.

    - ``name`` is what messages and metrics call it. ``single``: it is asked about one episode at a time; else about a group.
    - ``ready`` returns when ``mark`` can be called; what it takes to get there is not part of the deadline. Nothing else runs
      between its return and the beginning of ``mark``. What it raises costs the call.
    - ``mark`` is asked about episodes that are fit to be scored, and answers with a mark for each, in order. What it raises costs
      all of them. It is cancelled at the deadline, and must be able to be asked again after that.
    """

    @property
    def name(self) -> str: ...

    @property
    def single(self) -> bool: ...

    async def ready(self) -> None: ...

    async def mark(self, group: Group) -> Sequence[ScoreResult]: ...
