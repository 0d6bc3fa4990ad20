"""The rollout of one prompt, from admission to the buffer: G episodes, scored together, each failing alone."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, suppress
from typing import Any

import anyio
import anyio.lowlevel
import msgspec
from anyio.abc import TaskGroup

from corrente.common.threads import guard_user_code
from corrente.common.waiting import WaitRegistry
from corrente.controller.failure_budget import ENGINE, ENVIRONMENT, SCORING, FailureBudget
from corrente.controller.ledger import Admission
from corrente.controller.partial_rollout import PartialRollout, RequestRecord
from corrente.controller.parts import Parts
from corrente.controller.request_gate import RequestGate
from corrente.data.types import Completion, Episode, Group, Prompt, Request
from corrente.engine.base import Engine
from corrente.env.base import Env, PlayedEpisode, finite_reward
from corrente.errors import (
    DeadlineError,
    GenerationError,
    LedgerError,
    PipelineError,
    RewardError,
    error_text,
    root_cause,
)
from corrente.score.base import Scorer

CHECKS = 8
"""Checks per deadline, of whether the engine serves the episode or has it wait for its turn."""
STILL_CHECKS = 4
"""Checks in a row at which an engine that has requests may have computed no further token, and counts as at work all the same: a
prefill, or a token of a slow engine, may take so long."""
CHECK_S = 5.0
"""Seconds a check waits for the engine's answer; without one the time counts against the episode."""


def episode_seed(run_seed: int, prompt_id: str, index: int) -> int:
    """The seed of an episode. It depends on the run's seed, the prompt and the episode's index alone: a rerun repeats it."""
    digest = hashlib.blake2b(f"{run_seed}/{prompt_id}/{index}".encode(), digest_size=6).digest()
    return int.from_bytes(digest, "little")


class Player:
    """Plays episodes against the engine, through the request gate, under a deadline; failures become data. ``held_out``: those of
    an evaluation."""

    def __init__(
        self,
        parts: Parts,
        env: Env,
        *,
        gate: RequestGate,
        waits: WaitRegistry,
        budget: FailureBudget,
        held_out: bool = False,
    ) -> None:
        self._env = env
        self._engine = parts.engine
        self._gate = gate
        self._waits = waits
        self._budget = budget
        self._deadline_s = parts.plan.limits.episode_s
        self._held_out = held_out
        self._playing: list[_Playing] = []

    def end_idle_episodes(self, reason: str) -> int:
        """End the episodes that wait for their environment, not for the engine, with ``reason``; returns their number."""
        idle = [playing for playing in self._playing if not playing.partial.waits and not playing.reason]
        for playing in idle:
            playing.reason = reason
            playing.scope.cancel()
        return len(idle)

    async def group(self, ticket: int, admission: Admission, *, seed: int, releases: AsyncExitStack) -> Group:
        """Play the episodes of ``admission``, all at once. The group has all of them, failed ones included, in order.

        ``releases`` collects ``PlayedEpisode.release`` of each; the caller closes it when the group is scored.
        """
        prompt, partials = admission.prompt, admission.partials
        episodes: list[Episode | None] = [None] * len(partials)

        async def one(index: int, partial: PartialRollout) -> None:
            seed_of = episode_seed(seed, prompt.id, index)
            episodes[index] = await self.episode(
                prompt, group=ticket, index=index, seed=seed_of, partial=partial, releases=releases, tasks=tasks
            )

        async with anyio.create_task_group() as tasks:
            for index, partial in enumerate(partials):
                tasks.start_soon(one, index, partial)
        done = tuple(e for e in episodes if e is not None)
        assert len(done) == len(episodes)
        return Group(id=ticket, prompt=prompt, episodes=done, admitted_version=admission.version)

    async def episode(
        self,
        prompt: Prompt,
        *,
        group: int,
        index: int,
        seed: int,
        releases: AsyncExitStack,
        tasks: TaskGroup,
        key: str = "",
        partial: PartialRollout | None = None,
    ) -> Episode:
        """Play one episode. A failure of engine or environment is recorded in it; PipelineError passes through.

        ``key`` is unique to the prompt's admission; empty: the group's number. The episode's deadline runs as one of ``tasks``,
        so that it outlives no group.
        """
        blank = Episode(prompt_id=prompt.id, group_id=group, index=index)
        partial = partial or PartialRollout()
        played: PlayedEpisode | None = None
        failure: BaseException = DeadlineError(f"no result within limits.episode_s = {self._deadline_s} s")
        clock = anyio.CancelScope()
        playing = _Playing(partial)
        self._playing.append(playing)
        try:
            with playing.scope as scope:
                tasks.start_soon(self._keep_deadline, clock, partial, scope)
                with guard_user_code():
                    found = await self._env.play(
                        prompt,
                        lambda request: self._generate(request, partial),
                        key=f"{key or group}/{index}",
                        group=key or str(group),
                        seed=seed,
                    )
                if found.release is not None:
                    releases.push_async_callback(self._release, found.release)
                played = _with_rewards(found)
        except Exception as error:
            failure = _episode_failure(error)
        finally:
            clock.cancel()
            self._playing.remove(playing)
        if playing.reason and isinstance(failure, DeadlineError):
            failure = DeadlineError(playing.reason)
        if played is not None:
            self._budget.attempt(ENGINE)
            self._budget.attempt(ENVIRONMENT)
            return _episode(blank, msgspec.structs.replace(played, metrics=self._metrics(played.metrics)))
        late = isinstance(failure, DeadlineError)
        engine = isinstance(failure, GenerationError) or (late and partial.waits)
        return self._failed(blank, failure, boundary=ENGINE if engine else ENVIRONMENT, late=late)

    def _failed(self, episode: Episode, failure: BaseException, *, boundary: str, late: bool) -> Episode:
        text = error_text(failure)
        self._budget.attempt(boundary, text)
        return msgspec.structs.replace(episode, status="timeout" if late else "failed", error=f"{boundary}: {text}")

    async def _keep_deadline(
        self, clock: anyio.CancelScope, partial: PartialRollout, episode: anyio.CancelScope
    ) -> None:
        """Cancel ``episode`` when its deadline is over, or end when ``clock`` is cancelled. Time in the engine's queue does not
        count: the length of the queue says nothing about the episode."""
        left, queue = CHECKS, _QueueCheck(self._engine, partial)
        with clock:
            while left:
                await anyio.sleep(self._deadline_s / CHECKS)
                left -= not await queue.is_waiting()
            episode.cancel()

    async def _release(self, release: Callable[[], Awaitable[None]]) -> None:
        """Release the environment of an episode that is scored, or lost. A failure becomes a warning."""
        try:
            with guard_user_code():
                await release()
        except Exception as error:
            failure = _episode_failure(error)
            self._budget.warn_once("release", f"an environment could not be released: {error_text(failure)}")

    def _metrics(self, metrics: Mapping[str, Any]) -> dict[str, float]:
        """The metrics of an environment that are numbers; the others cost a warning."""
        numbers: dict[str, float] = {}
        for name, value in metrics.items():
            try:
                numbers[name] = float(value)
            except (TypeError, ValueError):
                self._budget.warn_once(
                    "metrics", f"metric {name} = {value!r} of an environment is no number, and left out"
                )
        return numbers

    async def _generate(self, request: Request, partial: PartialRollout) -> Completion:
        """Ask the engine until the request is finished. After an interruption of ours only the rest is asked for."""
        entry = partial.open(request)
        while not entry.finished:
            async with AsyncExitStack() as stack:
                with self._waits.register_wait("generate", "the request gate"):
                    passage = await stack.enter_async_context(self._gate.request(request.id, held_out=self._held_out))
                try:
                    with self._waits.register_wait("generate", "the engine"), entry.asking():
                        part = await self._engine.generate(entry.next)
                    entry.add(part, interrupted=passage.interrupted)
                except Exception as error:
                    failure = _episode_failure(error)
                    if isinstance(failure, GenerationError):
                        raise failure from error
                    raise GenerationError(error_text(failure)) from error
        await anyio.lowlevel.checkpoint()
        return entry.completion


class _Playing:
    """An episode while it is played. ``reason``: why it was ended; empty: it was not."""

    def __init__(self, partial: PartialRollout) -> None:
        self.partial, self.scope, self.reason = partial, anyio.CancelScope(), ""


class _QueueCheck:
    """Tells time in the engine's queue from time that counts against an episode.

    An episode is in the queue when it has asked and got no token, others wait as well, and the engine is at work on earlier
    requests. An engine that is stuck, or has lost the request, has no queue.
    """

    def __init__(self, engine: Engine, partial: PartialRollout) -> None:
        self._engine, self._partial = engine, partial
        self._served = set[tuple[str, int]]()
        self._computed = self._still = 0

    async def is_waiting(self) -> bool:
        """Ask the engine; False where it does not answer within CHECK_S."""
        live = self._partial.live()
        if not live or any(_call(entry) in self._served for entry in live):
            return False
        with (
            anyio.move_on_after(CHECK_S),
            suppress(Exception),  # the request itself fails with what is wrong with the engine
        ):
            calls = {entry.id: _call(entry) for entry in live}
            if found := await self._engine.partial_completions(tuple(calls)):
                self._served.update(calls[name] for name in found)
                return False
            stats = await self._engine.stats()
            before, self._computed = self._computed, stats.decode_tokens + stats.prefill_tokens
            self._still = 0 if self._computed > before else self._still + 1
            return stats.waiting > 0 and (not self._still or (stats.running > 0 and self._still <= STILL_CHECKS))
        return False


def _call(entry: RequestRecord) -> tuple[str, int]:
    """The identity of one call of the engine: an interrupted request queues again."""
    return entry.id, entry.written


def _with_rewards(played: PlayedEpisode) -> PlayedEpisode:
    """``played`` with its rewards as floats. Raises RolloutError for one that is not a finite number."""
    name = "the environment"
    for step in played.step_scores:
        finite_reward(step.score, name)
    return msgspec.structs.replace(
        played,
        rewards={key: None if value is None else finite_reward(value, name) for key, value in played.rewards.items()},
        agent_rewards={agent: finite_reward(value, name) for agent, value in played.agent_rewards.items()},
    )


def _episode(blank: Episode, played: PlayedEpisode) -> Episode:
    return msgspec.structs.replace(
        blank,
        turns=played.turns,
        messages=played.messages,
        opening=played.opening,
        env_rewards=played.rewards,
        agent_rewards=played.agent_rewards,
        step_scores=played.step_scores,
        cut=played.cut,
        metrics=played.metrics,
        extra=played.extra,
        environment=played.environment,
    )


def _episode_failure(error: Exception) -> BaseException:
    """The cause of the failure of one episode, or one scoring. A failure that ends the run is raised instead."""
    failure = root_cause(error)
    if isinstance(failure, PipelineError | LedgerError):
        raise failure
    return failure


def survivors(group: Group) -> Group:
    """The group of those episodes that did not fail."""
    alive = tuple(e for e in group.episodes if e.status == "ok")
    return msgspec.structs.replace(group, episodes=alive)


def first_error(group: Group) -> str:
    """The error of the first failed episode; empty when none failed."""
    return next((e.error for e in group.episodes if e.status != "ok"), "")


async def score_group(scorer: Scorer, group: Group, budget: FailureBudget) -> Group:
    """The group with its rewards, and without live environments. An episode whose scoring failed has that status; all of them do
    when the scorer raises."""
    try:
        with guard_user_code():
            after = await scorer.score(group)
        if len(after.episodes) != len(group.episodes):
            raise RewardError(f"the scorer returned {len(after.episodes)} episodes for {len(group.episodes)}")
    except Exception as error:
        failure = _episode_failure(error)
        text = error_text(failure)
        lost = tuple(msgspec.structs.replace(e, status="failed", error=text) for e in group.episodes)
        after = msgspec.structs.replace(group, episodes=lost)
    for episode in after.episodes:
        budget.attempt(SCORING, "" if episode.status == "ok" else episode.error)
    alone = tuple(msgspec.structs.replace(e, environment=None) for e in after.episodes)
    return msgspec.structs.replace(after, episodes=alone)
