"""The protocols of scoring. It runs beside generation; one group's scoring never waits for another's.

Scorer        the pipeline's view: a group in, the group with its rewards out
Source        one term of a reward: a function, a model, a judge, a teacher. ``combined`` makes a Scorer of many
ScoreResult   a source's result for one episode
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from corrente.data.types import Group, Metrics, StepScore, TeacherLogprobs


class ScoreResult(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A source's result for one episode. ``score`` None: it does not apply. ``error``: the reason of a failure; empty for none.

    ``steps``, ``taught`` and ``extra`` are added to the episode's; ``metrics`` are numbers to be averaged and reported.
    """

    score: float | None = None
    error: str = ""
    steps: tuple[StepScore, ...] = ()
    taught: tuple[TeacherLogprobs, ...] = ()
    extra: dict[str, object] = {}
    metrics: dict[str, float] = {}


class Scorer(Protocol):
    """Contract.

    - ``score`` returns the group with ``scores`` and ``reward`` filled in, episodes in the same order. An episode whose scoring
      failed comes back with status "failed" or "timeout" and an error that names the function; the others keep their rewards.
    - Raises nothing but cancellation for a fault of a reward function.
    - Never blocks the event loop: synchronous functions run in a thread, or process, with a deadline.
    - ``stats``: per source, calls that wait and run now, and latencies and failures since the start.
    """

    async def score(self, group: Group) -> Group: ...

    def stats(self) -> Metrics: ...


class Source(Protocol):
    """Contract.

    - ``name`` is its name in messages and metrics. ``single``: it scores one episode a call; else a whole group.
    - ``wait_until_ready`` returns when ``score_episodes`` can be called; the time it takes is not part of the deadline. Nothing
      else runs between its return and the beginning of ``score_episodes``. What it raises costs the call.
    - ``score_episodes`` gets the episodes that can be scored, and returns a result for each, in order. What it raises costs
      all of them. It is cancelled at the deadline, and must be able to be asked again after that.
    """

    @property
    def name(self) -> str: ...

    @property
    def single(self) -> bool: ...

    async def wait_until_ready(self) -> None: ...

    async def score_episodes(self, group: Group) -> Sequence[ScoreResult]: ...
