"""Held-out prompts through the same engine, beside training: labelled with the versions that sampled them, never in its way.

An evaluation that is played while training goes on keeps to a part of the engine (``eval.at_once``), so that the learner does not
wait for groups behind a wall of held-out prompts. Once the last step is taken it may use all of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AsyncExitStack

import anyio
import msgspec

from corrente.controller.eval_metrics import eval_metrics
from corrente.controller.failure_budget import FailureBudget
from corrente.controller.journal import Journal
from corrente.controller.parts import Parts
from corrente.controller.request_gate import RequestGate
from corrente.controller.rollout import Player, episode_seed, scored, survivors
from corrente.data.types import Episode, Group, Prompt


class Evaluation(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What came of one: numbers as in eval_metrics, and ``eval/lost`` and ``eval/time_s``; a group per prompt that was not cut
    off, with all its samples, failed ones included; ``error``: what the first lost sample died of, empty where none was lost."""

    step: int
    version: int
    metrics: dict[str, float]
    groups: tuple[Group, ...]
    error: str = ""


class Evaluator:
    """One evaluation at a time; a version that falls due while one runs is skipped. Failures are counted and shown."""

    def __init__(self, parts: Parts, *, valve: RequestGate, journal: Journal, done: int = -1) -> None:
        """``done``: the newest version that was evaluated before."""
        plan = parts.plan
        self._scorer = parts.scorer
        self._prompts = parts.eval_prompts
        self._plan = plan.eval
        self._seed = plan.seed
        self._journal = journal
        self._budget = FailureBudget(fraction=1.0, window=1)
        env = parts.eval_env or parts.env
        self._player = Player(parts, env, valve=valve, waits=journal.waits, budget=self._budget)
        self._places = anyio.CapacityLimiter(plan.eval.at_once or plan.prompts_per_step * plan.group_size)
        self._scope = anyio.CancelScope()
        self.running = -1
        """The version that is being evaluated; -1: none."""
        self.done = done
        """The newest version whose evaluation was reported."""

    def due(self, version: int) -> bool:
        """Whether ``version`` is one to evaluate, and nothing stands in the way."""
        if (
            not self.wanted
            or version % self._plan.every
            or version <= self.done
            or (version == 0 and not self._plan.at_start)
        ):
            return False
        return self.running < 0

    @property
    def wanted(self) -> bool:
        return bool(self._prompts and self._plan.every)

    async def run(self, *, step: int, version: int) -> Evaluation | None:
        """Play every held-out prompt and report under ``eval/``, unless ``version`` was evaluated already. It is live now; the
        label is what really sampled."""
        if not self.wanted or version <= self.done:
            return None
        self.running = version
        try:
            with anyio.CancelScope() as self._scope:
                evaluation = await self._run(step, version)
                self._journal.sink.log_metrics(step, evaluation.metrics)
                self.done = version
                return evaluation
        finally:
            self.running = -1
        self._journal.sink.log_event(
            "warning", f"evaluation of version {version} was cut off: the run was asked to stop"
        )
        return None

    def hurry(self) -> None:
        """Training is over: let what is left of an evaluation use the whole engine."""
        self._places.total_tokens = math.inf

    def cut_off(self) -> None:
        """End the evaluation that is running, if one is, without a result."""
        self._scope.cancel()

    async def _run(self, step: int, version: int) -> Evaluation:
        start_s = self._journal.elapsed_s
        groups: dict[int, Group] = {}

        async def one(place: int, prompt: Prompt) -> None:
            async with AsyncExitStack() as held:
                played = await self._play(prompt, version, held)
                groups[place] = await self._score(played)
            self._journal.moved()

        with anyio.move_on_after(self._plan.deadline_s):
            async with anyio.create_task_group() as tasks:
                for place, prompt in enumerate(self._prompts):
                    tasks.start_soon(one, place, prompt)
        self._journal.span("evaluate", f"version {version}", start_s)
        ended = tuple(groups[place] for place in sorted(groups))
        metrics = eval_metrics(ended, pass_at=self._plan.pass_at, pass_reward=self._plan.pass_reward)
        lost = len(self._prompts) * self._plan.samples - int(metrics["eval/episodes"])
        error = self._told(version, lost, ended) if lost else ""
        numbers = {"eval/lost": float(lost), "eval/time_s": self._journal.elapsed_s - start_s}
        return Evaluation(step=step, version=version, metrics={**metrics, **numbers}, groups=ended, error=error)

    async def _play(self, prompt: Prompt, version: int, held: AsyncExitStack) -> Group:
        key = f"eval-{version}-{prompt.id}"
        episodes: dict[int, Episode] = {}

        async def sample(index: int) -> None:
            async with self._places:
                seed = episode_seed(self._seed, f"eval/{prompt.id}", index)
                episodes[index] = await self._player.episode(
                    prompt, group=-1, index=index, seed=seed, key=key, held=held, tasks=tasks
                )

        async with anyio.create_task_group() as tasks:
            for index in range(self._plan.samples):
                tasks.start_soon(sample, index)
        return Group(
            id=-1, prompt=prompt, episodes=tuple(episodes[at] for at in sorted(episodes)), admitted_version=version
        )

    async def _score(self, played: Group) -> Group:
        """All samples of a prompt are judged together, as in training; those that were lost in playing stay as they are."""
        alive = survivors(played)
        if not alive.episodes:
            return played
        judged = {e.index: e for e in (await scored(self._scorer, alive, self._budget)).episodes}
        return msgspec.structs.replace(played, episodes=tuple(judged.get(e.index, e) for e in played.episodes))

    def _told(self, version: int, lost: int, groups: Sequence[Group]) -> str:
        late = f"not done within eval.deadline_s = {self._plan.deadline_s} s"
        unjudged = "no reward applies" if any(e.reward is None for g in groups for e in g.episodes) else late
        first = next((e.error for g in groups for e in g.episodes if e.error), unjudged)
        self._journal.sink.log_event(
            "warning", f"evaluation of version {version} lost {lost} episodes; the first: {first}"
        )
        return first
