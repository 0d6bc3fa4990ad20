"""Virtual parts: everything the pipeline needs besides an engine, with a duration in place of a computation.

All of them wait with ``anyio.sleep`` and draw from generators of their own, so that under a virtual clock a run is decided by
its seed. They keep plain records (``steps``, ``published``, ...) for tests and the planner to read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import anyio
import msgspec
import numpy as np

from corrente.data.types import Batch, Episode, Group, Metrics, Prompt, Request, Row, Sampling, Turn
from corrente.env.base import Generate, PlayedEpisode
from corrente.errors import CheckpointError, DivergedError, RewardError, RolloutError
from corrente.sim.distributions import Distribution, Fixed, generator
from corrente.sim.faults import Chaos

Reward = Callable[[Episode, Prompt], float | None]
StepSeconds = Distribution | Callable[[Batch], float]
"""Seconds of an optimizer step: drawn, or a function of its batch."""

_NOTHING = Fixed(0.0)
_SECOND = Fixed(1.0)
_SAMPLING = Sampling()


class VirtualPrompts:
    """``rows`` prompts per epoch, ``epochs`` times (0: for ever), in order. Every row has tokens of its own."""

    def __init__(
        self, *, rows: int = 1 << 20, epochs: int = 1, prompt_tokens: int = 16, chaos: Chaos | None = None
    ) -> None:
        self._rows = rows
        self._epochs = epochs
        self._prompt_tokens = prompt_tokens
        self._chaos = chaos or Chaos()
        self._at = 0
        self.given: list[str] = []
        """Ids of the prompts handed out, in order, those of ``find`` included."""

    def next_prompt(self) -> Prompt | None:
        if self._chaos.pick("prompt", str(self._at)):
            raise OSError(f"injected fault at prompt {self._at}")
        if self._epochs and self._at >= self._rows * self._epochs:
            return None
        self._at += 1
        prompt = self._make(*divmod(self._at - 1, self._rows))
        self.given.append(prompt.id)
        return prompt

    def find_prompts(self, ids: Sequence[str]) -> tuple[Prompt, ...]:
        self.given.extend(ids)
        return tuple(self._make(*map(int, name.split("/"))) for name in ids)

    def state(self) -> dict[str, Any]:
        return {"at": self._at}

    def restore(self, state: dict[str, Any]) -> None:
        self._at = int(state["at"])

    def describe(self) -> str:
        return f"{self._rows} virtual prompts, {self._epochs or 'endless'} epochs"

    def _make(self, epoch: int, row: int) -> Prompt:
        tokens = np.full(self._prompt_tokens, row & 0x7FFF, np.int32)
        tokens[:2] = (row >> 15, row & 0x7FFF)
        return Prompt(id=f"{epoch}/{row}", tokens=tokens, fields={"row": row})


class VirtualEnv:
    """``turns`` completions in a row, ``tool_s`` seconds apart; each sees the conversation so far."""

    def __init__(
        self,
        *,
        sampling: Sampling = _SAMPLING,
        turns: int = 1,
        tool_s: Distribution = _NOTHING,
        seed: int = 0,
        chaos: Chaos | None = None,
    ) -> None:
        self._sampling = sampling
        self._turns = turns
        self._tool_s = tool_s
        self._seed = seed
        self._chaos = chaos or Chaos(seed=seed)

    async def play(self, prompt: Prompt, generate: Generate, *, key: str, group: str, seed: int) -> PlayedEpisode:
        rng = generator(self._seed, "tool", key) if self._turns > 1 else None
        await self._chaos.strike("env", key, RolloutError)
        turns = [Turn(speaker="user", tokens=prompt.tokens)]
        context = prompt.tokens
        for at in range(self._turns):
            if rng and at:
                await anyio.sleep(self._tool_s.draw(rng))
            request = Request(
                id=f"{key}/{at}", tokens=context, sampling=self._sampling, seed=seed + at, group="" if at else group
            )
            completion = await generate(request)
            turns.append(Turn(speaker="policy", tokens=completion.tokens, completion=completion, parent=len(turns) - 1))
            context = np.concatenate([context, completion.tokens])
        return PlayedEpisode(turns=tuple(turns))


class VirtualScorer:
    """Takes ``latency_s`` per group and gives each episode ``reward``, by default an even coin per (seed, prompt, index).

    An episode whose scoring is struck fails alone; a hang ends at ``deadline_s``.
    """

    def __init__(
        self,
        *,
        latency_s: Distribution = _NOTHING,
        reward: Reward | None = None,
        deadline_s: float = 30.0,
        seed: int = 0,
        chaos: Chaos | None = None,
    ) -> None:
        self._latency_s = latency_s
        self._reward = reward or self._coin
        self._deadline_s = deadline_s
        self._seed = seed
        self._chaos = chaos or Chaos(seed=seed)

    def stats(self) -> Metrics:
        return {}

    async def score(self, group: Group) -> Group:
        await anyio.sleep(self._latency_s.draw(generator(self._seed, "score", group.prompt.id)))
        if not self._chaos.touches("score"):
            return msgspec.structs.replace(group, episodes=tuple(self._give(e, group.prompt) for e in group.episodes))
        scored: list[Episode | None] = [None] * len(group.episodes)

        async def one(at: int) -> None:
            scored[at] = await self._one(group.episodes[at], group.prompt)

        async with anyio.create_task_group() as tasks:
            for at in range(len(scored)):
                tasks.start_soon(one, at)
        return msgspec.structs.replace(group, episodes=tuple(e for e in scored if e is not None))

    async def _one(self, episode: Episode, prompt: Prompt) -> Episode:
        status: Literal["failed", "timeout"] = "timeout"
        error = f"virtual_reward: no answer within {self._deadline_s} s"
        with anyio.move_on_after(self._deadline_s):
            try:
                await self._chaos.strike("score", f"{prompt.id}#{episode.index}", RewardError)
            except RewardError as failure:
                status, error = "failed", f"virtual_reward: {failure}"
            else:
                return self._give(episode, prompt)
        return msgspec.structs.replace(episode, status=status, error=error)

    def _give(self, episode: Episode, prompt: Prompt) -> Episode:
        reward = self._reward(episode, prompt)
        return msgspec.structs.replace(episode, scores={"virtual_reward": reward}, reward=reward)

    def _coin(self, episode: Episode, prompt: Prompt) -> float:
        return float(generator(self._seed, "reward", prompt.id, episode.index).random() < 0.5)


class Consumed(msgspec.Struct, frozen=True):
    """One group as it was trained on: ``version`` is that of the step, ``oldest`` that of its oldest trained token."""

    step: int
    version: int
    group: int
    prompt_id: str
    admitted_version: int
    oldest: int

    @property
    def age(self) -> int:
        return self.version - self.oldest


class VirtualAlgorithm:
    """Mean-baseline advantages, one row per episode, and no more: enough for the flow of groups, not for learning."""

    def __init__(self) -> None:
        self.consumed: list[Consumed] = []
        """Every group that entered a step, in order."""

    def trainable(self, group: Group) -> str:
        rewards = [r for r in group.rewards if r is not None]
        if len(rewards) < 2:
            return "fewer than two rewards"
        return "all rewards equal" if max(rewards) - min(rewards) < 1e-6 else ""

    def batch(
        self, groups: Sequence[Group], *, step: int, version: int, oldest_trainable: Sequence[int | None]
    ) -> Batch:
        for group, oldest in zip(groups, oldest_trainable, strict=True):
            trained = group.oldest_version if oldest is None else max(group.oldest_version, oldest)
            entry = Consumed(step, version, group.id, group.prompt.id, group.admitted_version, trained)
            self.consumed.append(entry)
        rows = [
            self._row(group, episode, oldest)
            for group, oldest in zip(groups, oldest_trainable, strict=True)
            for episode in group.episodes
            if episode.reward is not None
        ]
        return Batch(
            step=step,
            version=version,
            rows=tuple(rows),
            sequences=sum(len(g.episodes) for g in groups),
            tokens=sum(g.sampled_tokens for g in groups),
        )

    def _row(self, group: Group, episode: Episode, oldest: int | None) -> Row:
        rewards = [r for r in group.rewards if r is not None]
        versions = np.concatenate([np.empty(0, np.int32), *(c.versions for c in episode.completions)])
        mask = np.ones(len(versions), bool) if oldest is None else versions >= oldest
        advantage = (episode.reward or 0.0) - sum(rewards) / len(rewards)
        return Row(
            group=group.id,
            tokens=np.concatenate([np.empty(0, np.int32), *(c.tokens for c in episode.completions)]),
            loss_mask=mask,
            logprobs=np.full(len(versions), -1.0, np.float32),
            versions=versions,
            advantages=np.where(mask, np.float32(advantage), np.float32(0)),
        )


class LearnerStep(msgspec.Struct, frozen=True):
    """One optimizer step: its batch, and when it began."""

    step: int
    version: int
    groups: tuple[int, ...]
    max_lag: int
    start_s: float


class VirtualLearner:
    """Takes ``step_s`` per step, drawn or a function of the batch, and remembers what it trained on. ``state`` counts the steps
    taken: its only weight."""

    def __init__(self, *, step_s: StepSeconds = _SECOND, seed: int = 0, chaos: Chaos | None = None) -> None:
        self._step_s = step_s
        self._seed = seed
        self._chaos = chaos or Chaos(seed=seed)
        self.state = 0
        self.steps: list[LearnerStep] = []
        self._pieces, self._since_s = 0, math.inf

    async def step(self, batch: Batch) -> Metrics:
        began_s = anyio.current_time()
        await self._chaos.strike("step", str(batch.step), DivergedError)
        seconds = self._seconds(batch)
        self._since_s = anyio.current_time()
        await anyio.sleep(seconds)
        self._pieces, self._since_s = self.progress() + 1, math.inf
        lags = batch.lags()
        groups = tuple(dict.fromkeys(row.group for row in batch.rows))
        self.steps.append(LearnerStep(batch.step, batch.version, groups, int(lags.max()) if len(lags) else 0, began_s))
        self.state += bool(batch.rows)
        return {"train/loss": 0.0, "train/tokens": float(len(lags)), "learner/busy_s": seconds}

    def _seconds(self, batch: Batch) -> float:
        if callable(self._step_s):
            return self._step_s(batch)
        return self._step_s.draw(generator(self._seed, "step", batch.step))

    def progress(self) -> int:
        """A piece a second, from when a step is past what strikes it."""
        return self._pieces + int(max(0.0, anyio.current_time() - self._since_s))

    async def save(self, path: Path) -> None:
        await self._chaos.strike("save", str(path), CheckpointError)
        text = json.dumps({"state": self.state})
        try:
            (path / "learner.json").write_text(text)
        except OSError as error:
            raise CheckpointError(f"{path}: {error}") from error

    async def load(self, path: Path) -> None:
        await self._chaos.strike("load", str(path), CheckpointError)
        try:
            self.state = int(json.loads((path / "learner.json").read_text())["state"])
        except (OSError, ValueError, KeyError) as error:
            raise CheckpointError(f"{path}: {error}") from error


class RecordingSink:
    """Keeps all it is told, in order."""

    def __init__(self, *, chaos: Chaos | None = None) -> None:
        self._chaos = chaos or Chaos()
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.spans: list[tuple[str, str, float, float]] = []
        self.samples: list[tuple[int, dict[str, Any]]] = []
        self.events: list[tuple[str, str]] = []
        self.closed = False

    def log_metrics(self, step: int, values: Mapping[str, float]) -> None:
        self._fail("metrics")
        self.rows.append((step, dict(values)))

    def log_span(self, track: str, name: str, start_s: float, stop_s: float, attrs: Mapping[str, Any]) -> None:
        self._fail("span")
        self.spans.append((track, name, start_s, stop_s))

    def log_sample(self, step: int, sample: Mapping[str, Any]) -> None:
        self._fail("sample")
        self.samples.append((step, dict(sample)))

    def log_event(self, level: str, message: str) -> None:
        self._fail("event")
        self.events.append((level, message))

    def close(self) -> None:
        self.closed = True

    def _fail(self, what: str) -> None:
        if self._chaos.pick("sink", what):
            raise OSError(f"injected fault in sink {what!r}")
