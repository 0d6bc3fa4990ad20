"""Many sources, one reward: who is asked, when, for how long, and what becomes of a failure.

    reward = sum over the sources that apply of weight * score,         None where none applies

What an environment gave is one more term, of weight 1, under the name it has there.

All sources are asked about all groups at once, but each no more than ``at_once`` at a time; who is not asked yet waits, its group
keeps its slot, and so a slow source throttles admission and loses nothing. The deadline is that of a call, not of its wait.

A failure is data: with the policy "lose" it costs the episode, with "none" the source does not apply to it, with "default" it
gave the default. A policy is for exceptions: when every one of the last ``HOPELESS`` calls failed, it is suspended, episodes are
lost, and the run's failure budget decides. Nothing here stops the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import anyio
import msgspec

from corrente.common.threads import guard_user_code
from corrente.data.types import LARGEST_REWARD, Episode, Group, StepScore
from corrente.errors import ConfigError, DeadlineError, RolloutError, described, root_cause
from corrente.score.base import ScoreResult, Source
from corrente.score.call_stats import CallStats

HOPELESS = 32

Failing = Literal["lose", "none", "default"]


class ScorerTerms(msgspec.Struct, frozen=True, kw_only=True):
    """What a source is worth and what it is allowed. ``at_once`` 0: any number of calls. ``key`` is what to change about the
    deadline."""

    weight: float = 1.0
    deadline_s: float = 30.0
    at_once: int = 0
    failure: Failing = "lose"
    default: float = 0.0
    key: str = "reward.deadline_s"


class CombinedScorer:
    """Implements Scorer."""

    def __init__(self, members: Sequence[tuple[Source, ScorerTerms]]) -> None:
        names = [source.name for source, _ in members]
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            raise ConfigError(f"reward: two scorers are called {twice[0]!r}; give one of them another name")
        self.names = tuple(names)
        self._members = tuple(_Member(source, terms) for source, terms in members)

    async def score(self, group: Group) -> Group:
        """The group with ``scores`` and ``reward`` of its ok episodes filled in; others pass through as they are."""
        fit = tuple(e for e in group.episodes if e.status == "ok")
        if not fit:
            return group
        asked = msgspec.structs.replace(group, episodes=fit)
        verdicts: dict[str, list[ScoreVerdict]] = {}

        async def ask(member: _Member) -> None:
            verdicts[member.name] = await member.judge(asked)

        async with anyio.create_task_group() as tasks:
            for member in self._members:
                tasks.start_soon(ask, member)
        scored = iter(self._combine(e, [verdicts[m.name][at] for m in self._members]) for at, e in enumerate(fit))
        episodes = tuple(next(scored) if e.status == "ok" else e for e in group.episodes)
        return msgspec.structs.replace(group, episodes=episodes)

    def stats(self) -> dict[str, float]:
        """See Scorer.stats and ``CallStats.values``; what functions log themselves is under ``logged/``."""
        return {name: value for member in self._members for name, value in member.stats().items()}

    def _combine(self, episode: Episode, verdicts: Sequence[ScoreVerdict]) -> Episode:
        extra = {column: value for v in verdicts for column, value in v.mark.extra.items()}
        scores = {m.name: v.mark.score for m, v in zip(self._members, verdicts, strict=True) if not v.lost}
        kept = msgspec.structs.replace(
            episode,
            scores={**episode.env_rewards, **scores},
            extra={**episode.extra, **extra},
        )
        lost = [v for v in verdicts if v.lost]
        if lost:
            status = "timeout" if all(v.late for v in lost) else "failed"
            return msgspec.structs.replace(kept, status=status, error="; ".join(v.mark.error for v in lost))
        earned = [(m.terms.weight, v.mark) for m, v in zip(self._members, verdicts, strict=True)]
        terms = [weight * mark.score for weight, mark in earned if mark.score is not None]
        terms += [score for score in episode.env_rewards.values() if score is not None]
        reward = sum(terms) if terms else None
        if reward is not None and not abs(reward) <= LARGEST_REWARD:
            parts = ", ".join(f"{name} {score:g}" for name, score in kept.scores.items() if score is not None)
            error = f"the reward adds up to {reward:g} ({parts}); it must be at most {LARGEST_REWARD:g} in size"
            return msgspec.structs.replace(kept, status="failed", error=error)
        return msgspec.structs.replace(
            kept,
            reward=reward,
            step_scores=(
                *episode.step_scores,
                *(StepScore(s.turn, s.start, s.stop, weight * s.score) for weight, mark in earned for s in mark.steps),
            ),
            taught=(*episode.taught, *(taught for v in verdicts for taught in v.mark.taught)),
        )


class ScoreVerdict(msgspec.Struct, frozen=True):
    """A mark, and whether it costs the episode; ``late``: because the deadline passed."""

    mark: ScoreResult
    lost: bool = False
    late: bool = False


class _Member:
    """A source under its terms."""

    def __init__(self, source: Source, terms: ScorerTerms) -> None:
        self.name, self.terms = source.name, terms
        self._source = source
        self._meter = CallStats()
        self._places: anyio.CapacityLimiter | None = None
        self._failed_in_a_row = 0
        self._logged: dict[str, tuple[float, int]] = {}

    async def judge(self, group: Group) -> list[ScoreVerdict]:
        """One verdict per episode."""
        if not self._source.single:
            return await self._call(group)
        verdicts: list[list[ScoreVerdict]] = [[] for _ in group.episodes]

        async def one(at: int, episode: Episode) -> None:
            verdicts[at] = await self._call(msgspec.structs.replace(group, episodes=(episode,)))

        async with anyio.create_task_group() as tasks:
            for at, episode in enumerate(group.episodes):
                tasks.start_soon(one, at, episode)
        return [verdict for single in verdicts for verdict in single]

    def stats(self) -> dict[str, float]:
        logged = {f"logged/{name}": total / count for name, (total, count) in self._logged.items()}
        self._logged = {}
        return {**self._meter.values(self.name), **logged}

    async def _call(self, group: Group) -> list[ScoreVerdict]:
        """Wait for a place, ask, and make verdicts of whatever comes of it."""
        place = object()
        with self._meter.queued():
            await self._take(place)
        try:
            marks, late = await self._ask(group)
        finally:
            self._give_back(place)
        failed = any(mark.error for mark in marks)
        self._failed_in_a_row = self._failed_in_a_row + 1 if failed else 0
        if failed:
            self._meter.failed(late=late)
        if group.id >= 0:  # what is logged about evaluations would blur the numbers of training
            self._log(marks)
        return [self._verdict(mark, late=late) for mark in marks]

    async def _ask(self, group: Group) -> tuple[Sequence[ScoreResult], bool]:
        """Marks, and whether they say that the deadline passed."""
        count = len(group.episodes)
        try:
            await self._source.ready()
            with self._meter.called(), anyio.move_on_after(self.terms.deadline_s) as deadline:
                with guard_user_code():
                    marks = await self._source.mark(group)
                if len(marks) != count:
                    return [
                        ScoreResult(error=f"{self.name}: gave {len(marks)} marks for {count} episodes")
                    ] * count, False
                return marks, False
            assert deadline.cancelled_caught
        except Exception as error:  # user code, models, networks: anything may come, and it costs these episodes only
            cause = root_cause(error)
            text = str(cause) if isinstance(cause, RolloutError) else described(cause)
            text = text if text.startswith(f"{self.name}: ") else f"{self.name}: {text}"
            return [ScoreResult(error=text)] * count, isinstance(cause, DeadlineError)
        allowed = f"{self.terms.key} = {self.terms.deadline_s:g} s"
        return [ScoreResult(error=f"{self.name}: no answer within {allowed}")] * count, True

    def _verdict(self, mark: ScoreResult, *, late: bool) -> ScoreVerdict:
        if not mark.error:
            return ScoreVerdict(mark)
        if self.terms.failure == "lose" or self._failed_in_a_row >= HOPELESS:
            return ScoreVerdict(mark, True, late)
        score = self.terms.default if self.terms.failure == "default" else None
        return ScoreVerdict(ScoreResult(score=score, extra=mark.extra))

    def _log(self, marks: Sequence[ScoreResult]) -> None:
        for name, value in ((name, value) for mark in marks for name, value in mark.metrics.items()):
            total, count = self._logged.get(name, (0.0, 0))
            self._logged[name] = (total + value, count + 1)

    async def _take(self, place: object) -> None:
        if not self.terms.at_once:
            return
        if self._places is None:
            self._places = anyio.CapacityLimiter(
                self.terms.at_once
            )  # belongs to an event loop, so it is made inside one
        await self._places.acquire_on_behalf_of(place)

    def _give_back(self, place: object) -> None:
        if self._places is not None:
            self._places.release_on_behalf_of(place)
