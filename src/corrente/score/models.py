"""Models that score, each in a process of its own: reward models, process-reward models, teachers.

The controller loads no model: it gathers samples (``batching``) and asks the process (``networks``), which is replaced when it
dies, a few times in a run. Samples of many groups share a batch. The deadline is that of a batch, from when it is sent; waiting
for a batch is not counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import anyio
import numpy as np

from corrente.data.types import Group, Scores, StepScore, Tokens
from corrente.errors import ConfigError, DeadlineError, RewardError
from corrente.score import messages
from corrente.score.base import ScoreResult
from corrente.score.batching import Batcher
from corrente.score.calling import conversation_messages
from corrente.score.child import Child
from corrente.score.messages import Opinion, Sample

START_S = 600.0
"""Time a process gets to load its model."""
RESTARTS = 3
NICE = 5


class ModelProcess:
    """A process that holds a model. ``open`` starts it with ``spawn``; ``run`` must be running for samples to be scored."""

    def __init__(
        self,
        role: str,
        options: dict[str, Any],
        *,
        name: str,
        batch: int = 16,
        cells: int = 2048,
        deadline_s: float = 120.0,
        threads: int = 0,
        top: int = 0,
        log: Path | None = None,
        spawn: Callable[..., Child] = Child.spawn,
    ) -> None:
        self.name, self._spawn = name, spawn
        self._role, self._options = role, options
        self._deadline_s, self._threads, self._top, self._log = deadline_s, threads, top, log
        self._batcher = Batcher(self._forward, batch=batch, cells=cells)
        self._child: Child | None = None
        self._deaths = 0

    async def open(self) -> None:
        """Start the process, and return when the model is loaded. ConfigError when it cannot be."""
        child = self._spawn(self._role, self._options, nice=NICE, threads=self._threads, log=self._log)
        await child.ready(START_S, name=self.name)
        self._child = child

    async def run(self) -> None:
        """Score samples until cancelled."""
        await self._batcher.run()

    def close(self) -> None:
        """End the process."""
        if self._child is not None:
            self._child.kill()
            self._child = None

    async def ask(self, sample: Sample) -> Opinion:
        """Score one sample. RewardError where the model refuses it, DeadlineError where its batch was late."""
        opinion = await self._batcher.ask(sample)
        if opinion.error:
            raise RewardError(f"{self.name}: {opinion.error}")
        return opinion

    async def score(self, tokens: Tokens, *, top: int = 0) -> Scores:
        """See Engine.score; of a process that holds a causal LM. ``top`` is fixed when it is built."""
        assert top == self._top
        opinion = await self.ask(Sample(tokens=[int(t) for t in tokens]))
        return Scores(
            logprobs=np.asarray(opinion.logprobs, np.float32),
            top_ids=np.asarray(opinion.top_ids, np.int32).reshape(-1, top),
            top_logprobs=np.asarray(opinion.top_logprobs, np.float32).reshape(-1, top),
        )

    async def _forward(self, samples: list[Sample]) -> list[Opinion]:
        if self._child is None:
            await self._restart()
        assert self._child is not None
        answer: messages.Answer | None = None
        try:
            with anyio.move_on_after(self._deadline_s):
                answer = await self._child.ask(messages.Judge(samples=samples, top=self._top))
        finally:
            if answer is None:
                self.close()
        if answer is None:
            raise DeadlineError(
                f"no answer about {len(samples)} samples within {self._deadline_s:g} s; its process was killed"
            )
        if isinstance(answer, messages.Raised):
            raise RewardError(answer.error)
        assert isinstance(answer, messages.Judged)
        return answer.opinions

    async def _restart(self) -> None:
        if self._deaths == RESTARTS:
            raise RewardError(f"its process died {RESTARTS + 1} times, and is not started again")
        self._deaths += 1
        try:
            await self.open()
        except ConfigError as error:
            raise RewardError(str(error)) from error


Aggregate = Literal["min", "mean", "product", "last"]
AGGREGATES: Mapping[Aggregate, Callable[[list[float]], float]] = {
    "min": min,
    "mean": lambda scores: sum(scores) / len(scores),
    "product": math.prod,
    "last": lambda scores: scores[-1],
}


class RewardModelSource:
    """Implements Source: a sequence classifier's logit for prompt and completion."""

    single = True

    def __init__(self, process: ModelProcess) -> None:
        self.name, self._process = process.name, process

    async def wait_until_ready(self) -> None:
        """See Source."""

    async def score_episodes(self, group: Group) -> Sequence[ScoreResult]:
        """See Source."""
        (episode,) = group.episodes
        messages = conversation_messages(group.prompt, episode)
        sample = Sample(prompt=group.prompt.text, completion=episode.text, messages=messages)
        opinion = await self._process.ask(sample)
        return [ScoreResult(score=opinion.score)]


class ProcessRewardSource:
    """Implements Source: a token classifier's score for each step of each completion, aggregated over the episode."""

    single = True

    def __init__(self, process: ModelProcess, *, aggregate: Aggregate = "min") -> None:
        self.name, self._process = process.name, process
        self._aggregate = AGGREGATES[aggregate]

    async def wait_until_ready(self) -> None:
        """See Source."""

    async def score_episodes(self, group: Group) -> Sequence[ScoreResult]:
        """See Source. An episode with several completions has the steps of all of them, each judged after all before it."""
        (episode,) = group.episodes
        steps: list[StepScore] = []
        text_so_far = group.prompt.text
        for at, turn in enumerate(episode.turns):
            if turn.completion is None:
                continue
            sample = Sample(
                prompt=text_so_far, completion=turn.completion.text, tokens=[int(t) for t in turn.completion.tokens]
            )
            opinion = await self._process.ask(sample)
            steps += [StepScore(at, s.start, s.stop, s.score) for s in opinion.steps]
            text_so_far += turn.completion.text
        return [ScoreResult(score=self._aggregate([s.score for s in steps]) if steps else None, steps=tuple(steps))]
