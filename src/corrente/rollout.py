"""One prompt's way from admission to the buffer: G episodes, scored together, each failing alone."""

from __future__ import annotations

import hashlib
from contextlib import AsyncExitStack

import anyio
import msgspec

from corrente.budget import FailureBudget
from corrente.engine.base import Engine
from corrente.env.base import Env
from corrente.errors import DeadlineError, GenerationError, LedgerError, PipelineError, RewardError, root_cause
from corrente.score.base import Scorer
from corrente.traffic import Valve
from corrente.types import Completion, Episode, Group, Prompt, Request
from corrente.waiting import Waits


def episode_seed(run_seed: int, prompt_id: str, index: int) -> int:
    """A seed per episode that depends on nothing but the run's seed, the prompt and the episode's place: a rerun repeats it."""
    digest = hashlib.blake2b(f"{run_seed}/{prompt_id}/{index}".encode(), digest_size=6).digest()
    return int.from_bytes(digest, "little")


class Player:
    """Plays episodes against the engine, through the valve, under a deadline; failures become data."""

    def __init__(
        self, *, env: Env, engine: Engine, valve: Valve, waits: Waits, budget: FailureBudget, deadline_s: float
    ) -> None:
        self._env = env
        self._engine = engine
        self._valve = valve
        self._waits = waits
        self._budget = budget
        self._deadline_s = deadline_s

    async def group(self, ticket: int, prompt: Prompt, *, size: int, seed: int, version: int) -> Group:
        """Play ``size`` episodes at once. The group has all of them, failed ones included, in order."""
        episodes: list[Episode | None] = [None] * size

        async def one(index: int) -> None:
            episodes[index] = await self.episode(
                prompt, group=ticket, index=index, seed=episode_seed(seed, prompt.id, index)
            )

        async with anyio.create_task_group() as tasks:
            for index in range(size):
                tasks.start_soon(one, index)
        done = tuple(e for e in episodes if e is not None)
        return Group(id=ticket, prompt=prompt, episodes=done, admitted_version=version)

    async def episode(self, prompt: Prompt, *, group: int, index: int, seed: int, key: str = "") -> Episode:
        """Play one episode; whatever goes wrong in engine or environment is recorded in it. PipelineError passes through."""
        blank = Episode(prompt_id=prompt.id, group_id=group, index=index)
        try:
            with anyio.move_on_after(self._deadline_s) as deadline:
                turns = await self._env.play(
                    prompt,
                    self._generate,
                    key=f"{key or group}/{index}",
                    group=key or str(group),
                    seed=seed,
                )
                self._budget.attempt("the engine")
                self._budget.attempt("the environment")
                return msgspec.structs.replace(blank, turns=turns)
            assert deadline.cancelled_caught
            failure: BaseException = DeadlineError(f"no result within limits.episode_s = {self._deadline_s} s")
        except Exception as error:
            failure = _judged(error)
        return self._failed(blank, failure)

    def _failed(self, episode: Episode, failure: BaseException) -> Episode:
        text = f"{type(failure).__name__}: {failure}"
        late = isinstance(failure, DeadlineError)
        boundary = "the engine" if late or isinstance(failure, GenerationError) else "the environment"
        self._budget.attempt(boundary, text)
        return msgspec.structs.replace(episode, status="timeout" if late else "failed", error=f"{boundary}: {text}")

    async def _generate(self, request: Request) -> Completion:
        async with AsyncExitStack() as stack:
            with self._waits.on("generate", "the valve"):
                await stack.enter_async_context(self._valve.requests.enter())
            with self._waits.on("generate", "the engine"):
                return await self._engine.generate(request)


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
    """The group with its rewards, without the episodes that scoring lost. A scorer that raises loses all of them."""
    try:
        after = await scorer.score(group)
        if len(after.episodes) != len(group.episodes):
            raise RewardError(f"the scorer returned {len(after.episodes)} episodes for {len(group.episodes)}")
    except Exception as error:
        failure = _judged(error)
        text = f"{type(failure).__name__}: {failure}"
        lost = tuple(msgspec.structs.replace(e, status="failed", error=text) for e in group.episodes)
        after = msgspec.structs.replace(group, episodes=lost)
    for episode in after.episodes:
        budget.attempt("scoring", "" if episode.status == "ok" else episode.error)
    return after
