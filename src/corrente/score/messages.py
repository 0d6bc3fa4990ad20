"""The messages to scoring workers; common/rpc.py lays them on a stream."""

from __future__ import annotations

from typing import Any

import msgspec

from corrente.common.rpc import CancelCall
from corrente.score.calling import TrainerState


class CallFunction(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Call the function. Answered with score.calling.FunctionAnswer."""

    columns: dict[str, list[Any]]
    state: TrainerState
    count: int


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One conversation for a model: the prompt's text, the completion, and its tokens where they are needed. ``messages``:
    prompt and completion as messages, where the prompt is a conversation."""

    prompt: str = ""
    completion: str = ""
    messages: list[dict[str, Any]] = []
    tokens: list[int] = []


class JudgeSamples(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Have the model judge samples, as one batch. Answered with a list of Opinion, one per sample."""

    samples: list[Sample]
    top: int = 0


class Step(msgspec.Struct, frozen=True):
    """Tokens [start, stop) of a completion, and their score."""

    start: int
    stop: int
    score: float


class Opinion(msgspec.Struct, frozen=True, kw_only=True):
    """A model's answer to one Sample; ``error`` where it has none."""

    score: float | None = None
    error: str = ""
    steps: list[Step] = []
    logprobs: list[float] = []
    top_ids: list[list[int]] = []
    top_logprobs: list[list[float]] = []


Question = CallFunction | JudgeSamples | CancelCall
