"""Combines many sources into one reward, under deadlines and failure policies.

    reward = sum over the sources that apply of weight * score,         None where none applies

An environment's own reward is one more term, of weight 1, under the environment's name.

All sources score all groups concurrently, each with at most ``at_once`` calls. A group that waits for its turn keeps its slot,
so a slow source throttles admission and loses nothing. The deadline is that of a call; waiting for its turn is not counted.

A failure is data: with the policy "lose" it costs the episode, with "none" the source does not apply to it, with "default" it
gave the default. When every one of the last ``ALWAYS_FAILING_AFTER`` calls failed, the policy is suspended: episodes are lost,
and the run's failure budget decides. Nothing here stops the run.
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

ALWAYS_FAILING_AFTER = 32

FailurePolicy = Literal["lose", "none", "default"]


class ScorerTerms(msgspec.Struct, frozen=True, kw_only=True):
    """A source's weight and limits. ``at_once`` 0: any number of concurrent calls. ``key``: the config key of the deadline."""

    weight: float = 1.0
    deadline_s: float = 30.0
    at_once: int = 0
    failure: FailurePolicy = "lose"
    default: float = 0.0
    key: str = "reward.deadline_s"


class CombinedScorer:
    """Implements Scorer: asks every member about every group, and adds up their weighted scores."""

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
            verdicts[member.name] = await member.score_group(asked)

        async with anyio.create_task_group() as tasks:
            for member in self._members:
                tasks.start_soon(ask, member)
        scored = iter(self._combine(e, [verdicts[m.name][at] for m in self._members]) for at, e in enumerate(fit))
        episodes = tuple(next(scored) if e.status == "ok" else e for e in group.episodes)
        return msgspec.structs.replace(group, episodes=episodes)

    def stats(self) -> dict[str, float]:
        """See Scorer.stats and ``CallStats.metrics``; what functions log themselves is under ``logged/``."""
        return {name: value for member in self._members for name, value in member.stats().items()}

    def _combine(self, episode: Episode, verdicts: Sequence[ScoreVerdict]) -> Episode:
        extra = {column: value for v in verdicts for column, value in v.result.extra.items()}
        scores = {m.name: v.result.score for m, v in zip(self._members, verdicts, strict=True) if not v.lost}
        with_scores = msgspec.structs.replace(
            episode,
            scores={**episode.env_rewards, **scores},
            extra={**episode.extra, **extra},
        )
        lost = [v for v in verdicts if v.lost]
        if lost:
            status = "timeout" if all(v.late for v in lost) else "failed"
            return msgspec.structs.replace(with_scores, status=status, error="; ".join(v.result.error for v in lost))
        earned = [(m.terms.weight, v.result) for m, v in zip(self._members, verdicts, strict=True)]
        terms = [weight * result.score for weight, result in earned if result.score is not None]
        terms += [score for score in episode.env_rewards.values() if score is not None]
        reward = sum(terms) if terms else None
        if reward is not None and not abs(reward) <= LARGEST_REWARD:
            parts = ", ".join(f"{name} {score:g}" for name, score in with_scores.scores.items() if score is not None)
            error = f"the reward adds up to {reward:g} ({parts}); it must be at most {LARGEST_REWARD:g} in size"
            return msgspec.structs.replace(with_scores, status="failed", error=error)
        return msgspec.structs.replace(
            with_scores,
            reward=reward,
            step_scores=(
                *episode.step_scores,
                *(
                    StepScore(s.turn, s.start, s.stop, weight * s.score)
                    for weight, result in earned
                    for s in result.steps
                ),
            ),
            taught=(*episode.taught, *(taught for v in verdicts for taught in v.result.taught)),
        )


class ScoreVerdict(msgspec.Struct, frozen=True):
    """A result under the failure policy. ``lost``: it costs the episode; ``late``: because the deadline passed."""

    result: ScoreResult
    lost: bool = False
    late: bool = False


class _Member:
    """A source under its terms."""

    def __init__(self, source: Source, terms: ScorerTerms) -> None:
        self.name, self.terms = source.name, terms
        self._source = source
        self._call_stats = CallStats()
        self._limiter: anyio.CapacityLimiter | None = None
        self._failed_in_a_row = 0
        self._logged: dict[str, tuple[float, int]] = {}

    async def score_group(self, group: Group) -> list[ScoreVerdict]:
        """Score a group; one verdict per episode."""
        if not self._source.single:
            return await self._call(group)
        verdicts: list[list[ScoreVerdict]] = [[] for _ in group.episodes]

        async def score_one(at: int, episode: Episode) -> None:
            verdicts[at] = await self._call(msgspec.structs.replace(group, episodes=(episode,)))

        async with anyio.create_task_group() as tasks:
            for at, episode in enumerate(group.episodes):
                tasks.start_soon(score_one, at, episode)
        return [verdict for single in verdicts for verdict in single]

    def stats(self) -> dict[str, float]:
        logged = {f"logged/{name}": total / count for name, (total, count) in self._logged.items()}
        self._logged = {}
        return {**self._call_stats.metrics(self.name), **logged}

    async def _call(self, group: Group) -> list[ScoreVerdict]:
        """Wait for a slot, ask, and make verdicts of whatever comes of it."""
        slot = object()
        with self._call_stats.count_waiting():
            await self._take_slot(slot)
        try:
            results, late = await self._ask(group)
        finally:
            self._free_slot(slot)
        failed = any(result.error for result in results)
        self._failed_in_a_row = self._failed_in_a_row + 1 if failed else 0
        if failed:
            self._call_stats.count_failure(late=late)
        if group.id >= 0:  # metrics of evaluations must not be averaged with those of training
            self._log_metrics(results)
        return [self._verdict(result, late=late) for result in results]

    async def _ask(self, group: Group) -> tuple[Sequence[ScoreResult], bool]:
        """Call the source. Returns its results, and True if the deadline passed."""
        count = len(group.episodes)
        try:
            await self._source.wait_until_ready()
            with self._call_stats.count_running(), anyio.move_on_after(self.terms.deadline_s) as deadline:
                with guard_user_code():
                    results = await self._source.score_episodes(group)
                if len(results) != count:
                    return [
                        ScoreResult(error=f"{self.name}: gave {len(results)} marks for {count} episodes")
                    ] * count, False
                return results, False
            assert deadline.cancelled_caught
        except Exception as error:  # user code, models, networks: anything may come, and it costs these episodes only
            cause = root_cause(error)
            text = str(cause) if isinstance(cause, RolloutError) else described(cause)
            text = text if text.startswith(f"{self.name}: ") else f"{self.name}: {text}"
            return [ScoreResult(error=text)] * count, isinstance(cause, DeadlineError)
        allowed = f"{self.terms.key} = {self.terms.deadline_s:g} s"
        return [ScoreResult(error=f"{self.name}: no answer within {allowed}")] * count, True

    def _verdict(self, result: ScoreResult, *, late: bool) -> ScoreVerdict:
        if not result.error:
            return ScoreVerdict(result)
        if self.terms.failure == "lose" or self._failed_in_a_row >= ALWAYS_FAILING_AFTER:
            return ScoreVerdict(result, True, late)
        score = self.terms.default if self.terms.failure == "default" else None
        return ScoreVerdict(ScoreResult(score=score, extra=result.extra))

    def _log_metrics(self, results: Sequence[ScoreResult]) -> None:
        for name, value in ((name, value) for result in results for name, value in result.metrics.items()):
            total, count = self._logged.get(name, (0.0, 0))
            self._logged[name] = (total + value, count + 1)

    async def _take_slot(self, slot: object) -> None:
        if not self.terms.at_once:
            return
        if self._limiter is None:
            self._limiter = anyio.CapacityLimiter(
                self.terms.at_once
            )  # belongs to an event loop, so it is made inside one
        await self._limiter.acquire_on_behalf_of(slot)

    def _free_slot(self, slot: object) -> None:
        if self._limiter is not None:
            self._limiter.release_on_behalf_of(slot)
