"""One prompt's way from admission to the buffer: G episodes, scored together, each failing alone."""

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
    root_cause,
)
from corrente.score.base import Scorer

LOOKS = 8
"""So often within its deadline it is looked whether an episode is being served, or waits for its turn at the engine."""
STILL = 4
"""Looks in a row at which an engine that has requests may have computed no further token, and counts as at work all the same: a
prefill, or a token of a slow engine, may take so long."""
LOOK_S = 5.0
"""How long such a look waits for the engine's answer; without one the time counts."""


def episode_seed(run_seed: int, prompt_id: str, index: int) -> int:
    """A seed per episode that depends on nothing but the run's seed, the prompt and the episode's place: a rerun repeats it."""
    digest = hashlib.blake2b(f"{run_seed}/{prompt_id}/{index}".encode(), digest_size=6).digest()
    return int.from_bytes(digest, "little")


class Player:
    """Plays episodes against the engine, through the valve, under a deadline; failures become data."""

    def __init__(
        self, parts: Parts, env: Env, *, valve: RequestGate, waits: WaitRegistry, budget: FailureBudget
    ) -> None:
        self._env = env
        self._engine = parts.engine
        self._valve = valve
        self._waits = waits
        self._budget = budget
        self._deadline_s = parts.plan.limits.episode_s

    async def group(self, ticket: int, admission: Admission, *, seed: int, held: AsyncExitStack) -> Group:
        """Play an episode per transcript, at once. The group has all of them, failed ones included, in order. ``held`` is
        left when the group is done with what its episodes hold (``PlayedEpisode.release``)."""
        prompt, transcripts = admission.prompt, admission.transcripts
        episodes: list[Episode | None] = [None] * len(transcripts)

        async def one(index: int, transcript: PartialRollout) -> None:
            seed_of = episode_seed(seed, prompt.id, index)
            episodes[index] = await self.episode(
                prompt, group=ticket, index=index, seed=seed_of, transcript=transcript, held=held, tasks=tasks
            )

        async with anyio.create_task_group() as tasks:
            for index, transcript in enumerate(transcripts):
                tasks.start_soon(one, index, transcript)
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
        held: AsyncExitStack,
        tasks: TaskGroup,
        key: str = "",
        transcript: PartialRollout | None = None,
    ) -> Episode:
        """Play one episode; whatever goes wrong in engine or environment is recorded in it. PipelineError passes through. Its
        clock is one of ``tasks``."""
        blank = Episode(prompt_id=prompt.id, group_id=group, index=index)
        asked = transcript or PartialRollout()
        played: PlayedEpisode | None = None
        failure: BaseException = DeadlineError(f"no result within limits.episode_s = {self._deadline_s} s")
        clock = anyio.CancelScope()
        try:
            with anyio.CancelScope() as scope:
                tasks.start_soon(self._clock, clock, asked, scope)
                with guard_user_code():
                    found = await self._env.play(
                        prompt,
                        lambda request: self._generate(request, asked),
                        key=f"{key or group}/{index}",
                        group=key or str(group),
                        seed=seed,
                    )
                if found.release is not None:
                    held.push_async_callback(self._release, found.release)
                played = _with_rewards(found)
        except Exception as error:
            failure = _judged(error)
        finally:
            clock.cancel()
        if played is not None:
            self._budget.attempt(ENGINE)
            self._budget.attempt(ENVIRONMENT)
            return _episode(blank, msgspec.structs.replace(played, metrics=self._numbers(played.metrics)))
        late = isinstance(failure, DeadlineError)
        engine = isinstance(failure, GenerationError) or (late and asked.waits)
        return self._failed(blank, failure, boundary=ENGINE if engine else ENVIRONMENT, late=late)

    def _failed(self, episode: Episode, failure: BaseException, *, boundary: str, late: bool) -> Episode:
        text = f"{type(failure).__name__}: {failure}"
        self._budget.attempt(boundary, text)
        return msgspec.structs.replace(episode, status="timeout" if late else "failed", error=f"{boundary}: {text}")

    async def _clock(self, clock: anyio.CancelScope, asked: PartialRollout, episode: anyio.CancelScope) -> None:
        """Cancel ``episode`` when its deadline is over, or end with ``clock``. Time that it waits for its turn at the engine does
        not count: how long the queue is says nothing about the episode."""
        left, queue = LOOKS, _Queue(self._engine, asked)
        with clock:
            while left:
                await anyio.sleep(self._deadline_s / LOOKS)
                left -= not await queue.holds()
            episode.cancel()

    async def _release(self, release: Callable[[], Awaitable[None]]) -> None:
        """The episode is scored, or lost: what its environment cannot give back is told, and costs nothing more."""
        try:
            with guard_user_code():
                await release()
        except Exception as error:
            failure = _judged(error)
            self._budget.tell("release", f"an environment could not be released: {type(failure).__name__}: {failure}")

    def _numbers(self, metrics: Mapping[str, Any]) -> dict[str, float]:
        """What of an environment's metrics can be reported."""
        numbers: dict[str, float] = {}
        for name, value in metrics.items():
            try:
                numbers[name] = float(value)
            except (TypeError, ValueError):
                self._budget.tell("metrics", f"metric {name} = {value!r} of an environment is no number, and left out")
        return numbers

    async def _generate(self, request: Request, transcript: PartialRollout) -> Completion:
        """Ask until the request is finished: an interruption of ours is not its end, and only what is missing is asked for."""
        entry = transcript.open(request)
        while not entry.finished:
            async with AsyncExitStack() as stack:
                with self._waits.register_wait("generate", "the valve"):
                    passage = await stack.enter_async_context(self._valve.request(request.id))
                try:
                    with self._waits.register_wait("generate", "the engine"), entry.asking():
                        part = await self._engine.generate(entry.next)
                    entry.add(part, interrupted=passage.interrupted)
                except Exception as error:
                    failure = _judged(error)
                    if isinstance(failure, GenerationError):
                        raise failure from error
                    raise GenerationError(f"{type(failure).__name__}: {failure}") from error
        await anyio.lowlevel.checkpoint()
        return entry.completion


class _Queue:
    """Whether the episode of a transcript waits for its turn: it has asked and nothing has come, others wait as well, and the
    engine is at work on what came before. One that is stuck, or has lost the request, holds nobody in a queue."""

    def __init__(self, engine: Engine, asked: PartialRollout) -> None:
        self._engine, self._asked = engine, asked
        self._served = set[tuple[str, int]]()
        self._computed = self._still = 0

    async def holds(self) -> bool:
        live = self._asked.live()
        if not live or any(_call(entry) in self._served for entry in live):
            return False
        with (
            anyio.move_on_after(LOOK_S),
            suppress(Exception),
        ):  # what is wrong with the engine the request itself will say
            calls = {entry.id: _call(entry) for entry in live}
            if found := await self._engine.partial_completions(tuple(calls)):
                self._served.update(calls[name] for name in found)
                return False
            stats = await self._engine.stats()
            before, self._computed = self._computed, stats.decode_tokens + stats.prefill_tokens
            self._still = 0 if self._computed > before else self._still + 1
            return stats.waiting > 0 and (not self._still or (stats.running > 0 and self._still <= STILL))
        return False


def _call(entry: RequestRecord) -> tuple[str, int]:
    """One call of the engine: an interrupted request queues again."""
    return entry.id, entry.written


def _with_rewards(played: PlayedEpisode) -> PlayedEpisode:
    """With rewards that are numbers. RolloutError where one is none."""
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


def _judged(error: Exception) -> BaseException:
    """What one episode, or one scoring, died of. A failure that ends the run is raised instead."""
    failure = root_cause(error)
    if isinstance(failure, PipelineError | LedgerError):
        raise failure
    return failure


def survivors(group: Group) -> Group:
    """The group of those episodes that did not fail."""
    alive = tuple(e for e in group.episodes if e.status == "ok")
    return msgspec.structs.replace(group, episodes=alive)


def first_error(group: Group) -> str:
    """What the first failed episode died of; empty when none did."""
    return next((e.error for e in group.episodes if e.status != "ok"), "")


async def scored(scorer: Scorer, group: Group, budget: FailureBudget) -> Group:
    """The group with its rewards, without the episodes that scoring lost, nor the environments they were played in. A scorer
    that raises loses all of them."""
    try:
        with guard_user_code():
            after = await scorer.score(group)
        if len(after.episodes) != len(group.episodes):
            raise RewardError(f"the scorer returned {len(after.episodes)} episodes for {len(group.episodes)}")
    except Exception as error:
        failure = _judged(error)
        text = f"{type(failure).__name__}: {failure}"
        lost = tuple(msgspec.structs.replace(e, status="failed", error=text) for e in group.episodes)
        after = msgspec.structs.replace(group, episodes=lost)
    for episode in after.episodes:
        budget.attempt(SCORING, "" if episode.status == "ok" else episode.error)
    alone = tuple(msgspec.structs.replace(e, environment=None) for e in after.episodes)
    return msgspec.structs.replace(after, episodes=alone)
