"""Evaluation: held-out prompts through the engine that trains, beside training, labelled with the versions that sampled them.

While training goes on, an evaluation keeps to a part of the engine (``eval.at_once``), so that the learner does not wait for
groups behind a queue of held-out prompts. Once the last step is taken it may use the whole engine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AsyncExitStack

import anyio
import msgspec

from corrente.controller.eval_metrics import eval_metrics
from corrente.controller.failure_budget import FailureBudget
from corrente.controller.parts import Parts
from corrente.controller.request_gate import RequestGate
from corrente.controller.rollout import Player, episode_seed, score_group, survivors
from corrente.controller.run_state import RunState
from corrente.data.types import Episode, Group, Prompt


class Evaluation(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The result of one evaluation of ``version``, the weights of ``step``.

    ``metrics``: those of eval_metrics, ``eval/lost`` (samples) and ``eval/time_s``. ``groups``: one per prompt that was done in
    time, with all its samples, failed ones included. ``error``: why the first lost sample failed; empty when none was lost.
    """

    step: int
    version: int
    metrics: dict[str, float]
    groups: tuple[Group, ...]
    error: str = ""

    def __repr__(self) -> str:
        reward = self.metrics.get("eval/reward")
        number = "no reward" if reward is None else f"reward {reward:.4g}"
        judged, lost = self.metrics["eval/episodes"], self.metrics["eval/lost"]
        return (
            f"<Evaluation of step {self.step}, version {self.version}: {number}, {judged:.0f} samples, {lost:.0f} lost>"
        )


class Evaluator:
    """Runs one evaluation at a time; a version that falls due while one runs is skipped. Failures are counted and reported."""

    def __init__(self, parts: Parts, state: RunState, *, gate: RequestGate) -> None:
        plan = parts.plan
        self._state = state
        self._scorer = parts.scorer
        self._prompts = parts.eval_prompts
        self._plan = plan.eval
        self._seed = plan.seed
        self._journal = state.journal
        self._budget = FailureBudget(fraction=1.0, window=1)
        env = parts.eval_env or parts.env
        self.player = Player(parts, env, gate=gate, waits=state.journal.waits, budget=self._budget, held_out=True)
        self._at_once = anyio.CapacityLimiter(plan.eval.at_once or plan.prompts_per_step * plan.group_size)
        self._scope = anyio.CancelScope()
        self.running = -1
        """The version that is being evaluated; -1: none."""

    def due(self, version: int) -> bool:
        """True when ``version`` is one to evaluate, was not evaluated yet, and no evaluation is running."""
        wanted = self.enabled and version % self._plan.every == 0 and (version > 0 or self._plan.at_start)
        return wanted and version > self._state.evaluated and self.running < 0

    @property
    def enabled(self) -> bool:
        """True when there are held-out prompts and evaluation is not switched off."""
        return bool(self._prompts and self._plan.every)

    async def run(self, *, step: int, version: int) -> Evaluation | None:
        """Play every held-out prompt and report under ``eval/``.

        None: evaluation is off, ``version`` was evaluated already, or the evaluation was cancelled.

        ``version`` is the live one; ``eval/version`` and ``eval/version_max`` say which versions really sampled.
        """
        if not self.enabled or version <= self._state.evaluated:
            return None
        self.running = version
        try:
            with anyio.CancelScope() as self._scope:
                evaluation = await self._run(step, version)
                self._journal.sink.log_metrics(step, evaluation.metrics)
                self._state.evaluated = version
                return evaluation
        finally:
            self.running = -1
        self._journal.sink.log_event(
            "warning", f"evaluation of version {version} was cut off: the run was asked to stop"
        )
        return None

    def use_whole_engine(self) -> None:
        """Lift the limit of ``eval.at_once``: training is over."""
        self._at_once.total_tokens = math.inf

    def cancel(self) -> None:
        """End the evaluation that is running, if there is one, without a result."""
        self._scope.cancel()

    async def _run(self, step: int, version: int) -> Evaluation:
        start_s = self._journal.elapsed_s
        groups: dict[int, Group] = {}

        async def one(place: int, prompt: Prompt) -> None:
            async with AsyncExitStack() as releases:
                played = await self._play(prompt, version, releases)
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
        error = self._warn_of_lost(version, lost, ended) if lost else ""
        numbers = {"eval/lost": float(lost), "eval/time_s": self._journal.elapsed_s - start_s}
        return Evaluation(step=step, version=version, metrics={**metrics, **numbers}, groups=ended, error=error)

    async def _play(self, prompt: Prompt, version: int, releases: AsyncExitStack) -> Group:
        key = f"eval-{version}-{prompt.id}"
        episodes: dict[int, Episode] = {}

        async def sample(index: int) -> None:
            async with self._at_once:
                seed = episode_seed(self._seed, f"eval/{prompt.id}", index)
                episodes[index] = await self.player.episode(
                    prompt, group=-1, index=index, seed=seed, key=key, releases=releases, tasks=tasks
                )

        async with anyio.create_task_group() as tasks:
            for index in range(self._plan.samples):
                tasks.start_soon(sample, index)
        return Group(
            id=-1, prompt=prompt, episodes=tuple(episodes[at] for at in sorted(episodes)), admitted_version=version
        )

    async def _score(self, played: Group) -> Group:
        """The group with its rewards: all samples of a prompt are judged together, as in training, but for those that failed."""
        alive = survivors(played)
        if not alive.episodes:
            return played
        judged = {e.index: e for e in (await score_group(self._scorer, alive, self._budget)).episodes}
        return msgspec.structs.replace(played, episodes=tuple(judged.get(e.index, e) for e in played.episodes))

    def _warn_of_lost(self, version: int, lost: int, groups: Sequence[Group]) -> str:
        late = f"not done within eval.deadline_s = {self._plan.deadline_s} s"
        unjudged = "no reward applies" if any(e.reward is None for g in groups for e in g.episodes) else late
        first = next((e.error for g in groups for e in g.episodes if e.error), unjudged)
        self._journal.sink.log_event(
            "warning", f"evaluation of version {version} lost {lost} episodes; the first: {first}"
        )
        return first
