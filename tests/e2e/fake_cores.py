"""Cores small enough to see through: prompts and batches whose first number says how to behave. No weights, no torch.

The engine answers a prompt with its own first token, each with ``value`` as its log-prob; the learner counts its steps.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from corrente.config import RunConfig
from corrente.data.types import ApplyMode, Batch, Completion, Request, Scores, Span, Tokens
from corrente.engine.base import EngineStats
from corrente.errors import ConfigError, DivergedError, GenerationError
from corrente.learner.base import Pulse, no_pulse
from corrente.sync.base import Update
from corrente.sync.layout import Layout

KILL, RAISE, SPIN, REFUSE, STOP, EXIT, DIVERGE, TORN = -1, -2, -3, -4, -5, -6, -7, -8


def behave(order: int) -> None:
    """Do what ``order`` says; nothing when it is no order."""
    if order == KILL:
        os.kill(os.getpid(), signal.SIGKILL)
    if order == STOP:
        os.kill(os.getpid(), signal.SIGSTOP)
    if order == RAISE:
        raise ZeroDivisionError("told to")
    if order == EXIT:
        sys.stderr.write("so long\nand thanks\n")
        sys.exit(3)
    while order == SPIN:
        pass


class Engine:
    device = "cpu"

    def __init__(self) -> None:
        self.update = Update(version=0, slot=0)
        self.live: dict[str, tuple[Request, list[float], list[int]]] = {}
        self.aborted: set[str] = set()

    def layout(self) -> Layout:
        return Layout(())

    def attach_buffers(self, buffers: Sequence[Any]) -> None:
        assert not buffers

    def apply(self, update: Update, mode: ApplyMode) -> None:
        self.update = update

    def is_slot_free(self, slot: int) -> bool:
        return slot != self.update.slot or self.update.version < 0

    @property
    def value(self) -> float:
        return 0.0

    def submit(self, request: Request) -> None:
        if request.tokens[0] == REFUSE:
            raise GenerationError("refused")
        self.live[request.id] = (request, [], [])

    def abort(self, ids: Sequence[str]) -> None:
        self.aborted |= {name for name in ids if name in self.live}

    def step(self) -> list[tuple[str, Completion | GenerationError]]:
        done: list[tuple[str, Completion | GenerationError]] = []
        for name, (request, logprobs, versions) in list(self.live.items()):
            behave(int(request.tokens[0]))
            if name not in self.aborted:
                logprobs.append(self.value)
                versions.append(self.update.version)
            if name in self.aborted or len(logprobs) == request.sampling.max_tokens - request.written:
                done.append((name, self._completion(name)))
        return done

    def partial_completions(self, ids: Sequence[str]) -> dict[str, Completion]:
        return {name: self._as_completion(name) for name in ids if name in self.live and self.live[name][1]}

    def _completion(self, name: str) -> Completion:
        done = self._as_completion(name)
        del self.live[name]
        return done

    def _as_completion(self, name: str) -> Completion:
        request, logprobs, versions = self.live[name]
        cuts = [0, *(i for i in range(1, len(versions)) if versions[i] != versions[i - 1]), len(versions)]
        return Completion(
            tokens=np.full(len(logprobs), request.tokens[0], np.int32),
            logprobs=np.array(logprobs, np.float32),
            spans=tuple(Span(versions[a], a, b) for a, b in itertools.pairwise(cuts) if b > a),
            finish_reason="length" if len(logprobs) == request.sampling.max_tokens - request.written else "abort",
        )

    def score(self, tokens: Tokens, top: int = 0) -> Scores:
        top_ids = np.tile(np.arange(top, dtype=np.int32), (len(tokens) - 1, 1))
        logprobs = np.full(len(tokens) - 1, self.value, np.float32)
        return Scores(logprobs=logprobs, top_ids=top_ids, top_logprobs=top_ids.astype(np.float32))

    def stats(self) -> EngineStats:
        return EngineStats(version=self.update.version, running=len(self.live))

    @property
    def idle(self) -> bool:
        return not self.live


class Learner:
    def __init__(self) -> None:
        self.steps = 0

    def step(self, batch: Batch, *, pulse: Pulse = no_pulse) -> dict[str, float]:
        pulse()
        if batch.step == DIVERGE:
            raise DivergedError("loss is nan")
        behave(batch.step)
        self.steps += 1
        return {"steps": np.float32(self.steps), "cpus": float(len(os.sched_getaffinity(0))), "nice": float(os.nice(0))}

    def tensors(self) -> Mapping[str, Any]:
        return {}

    def save(self, path: Path) -> None:
        (path / "steps").write_text(str(self.steps))

    def load(self, path: Path) -> None:
        self.steps = int((path / "steps").read_text())


def engine(config: RunConfig, index: int = 0) -> Engine:
    return Engine()


def learner(config: RunConfig) -> Learner:
    return Learner()


def refuses(config: RunConfig) -> Learner:
    raise ConfigError(f"model.path {config.model.path!r} is not to my taste")


def leaves(config: RunConfig) -> Learner:
    behave(EXIT)
    return Learner()


def hangs(config: RunConfig) -> Learner:
    while True:
        signal.pause()
