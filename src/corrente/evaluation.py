"""Held-out prompts through the same engine, beside training: labelled with the versions that sampled them, never in its way."""

from __future__ import annotations

from collections.abc import Sequence

import anyio

from corrente.budget import FailureBudget
from corrente.config import Eval
from corrente.journal import Journal
from corrente.rollout import Player, episode_seed, scored
from corrente.score.base import Scorer
from corrente.tally import eval_metrics
from corrente.types import Episode, Group, Prompt


class Evaluator:
    """One evaluation at a time; a version that falls due while one runs is skipped. Failures are counted and shown."""

    def __init__(
        self, *, player: Player, scorer: Scorer, prompts: Sequence[Prompt], plan: Eval, seed: int, journal: Journal
    ) -> None:
        self._player = player
        self._scorer = scorer
        self._prompts = prompts
        self._plan = plan
        self._seed = seed
        self._journal = journal
        self._budget = FailureBudget(fraction=1.0, window=1)
        self.running = False

    def due(self, version: int) -> bool:
        """Whether ``version`` is one to evaluate, and nothing stands in the way."""
        return bool(self._prompts and self._plan.every) and version % self._plan.every == 0 and not self.running

    async def run(self, *, step: int, version: int) -> None:
        """Play every held-out prompt and report under ``eval/``. ``version`` is live now; the label is what really sampled."""
        if not self._prompts or not self._plan.every:
            return
        self.running = True
        try:
            await self._run(step, version)
        finally:
            self.running = False

    async def _run(self, step: int, version: int) -> None:
        start_s = self._journal.elapsed_s
        episodes: list[Episode] = []

        async def one(prompt: Prompt, index: int) -> None:
            key = f"eval-{version}-{prompt.id}"
            seed = episode_seed(self._seed, f"eval/{prompt.id}", index)
            episode = await self._player.episode(prompt, group=-1, index=index, seed=seed, key=key)
            if episode.status == "ok":
                group = Group(id=-1, prompt=prompt, episodes=(episode,), admitted_version=version)
                episode = (await scored(self._scorer, group, self._budget)).episodes[0]
            episodes.append(episode)
            self._journal.moved()

        with anyio.move_on_after(self._plan.deadline_s):
            async with anyio.create_task_group() as tasks:
                for prompt in self._prompts:
                    for index in range(self._plan.samples):
                        tasks.start_soon(one, prompt, index)
        self._journal.span("evaluate", f"version {version}", start_s)
        metrics = eval_metrics(episodes)
        lost = len(self._prompts) * self._plan.samples - int(metrics["eval/episodes"])
        if lost:
            first = next(
                (e.error for e in episodes if e.error), f"not done within eval.deadline_s = {self._plan.deadline_s} s"
            )
            self._journal.sink.event(
                "warning", f"evaluation of version {version} lost {lost} episodes; the first: {first}"
            )
        self._journal.sink.metrics(step, {**metrics, "eval/lost": float(lost)})
