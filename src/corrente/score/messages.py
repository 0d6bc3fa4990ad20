"""What the controller and its scoring processes say to each other: msgpack in frames, typed, nothing unpickled.

A frame is a length (4 bytes, big-endian) and one value. A process is asked one thing at a time and answers once; the first thing
it says, unasked, is Ready or Refused.
"""

from __future__ import annotations

import struct
from typing import Any

import msgspec

from corrente.score.calling import FunctionAnswer, TrainerState

MAX_FRAME_BYTES = 1 << 30
HEADER = struct.Struct(">I")


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    pass


class Birth(_Message, frozen=True, kw_only=True):
    """A process's only argument, as JSON. ``role``: dotted path of what makes it answer, called with ``options``."""

    role: str
    options: dict[str, Any]
    socket: int
    parent: int
    nice: int = 0


class Ready(_Message, frozen=True, kw_only=True):
    """It can be asked."""


class Refused(_Message, frozen=True, kw_only=True):
    """It cannot be made ready, and ends."""

    message: str


class Ask(_Message, frozen=True, kw_only=True):
    """Call the function. Answered with Answered, or Raised."""

    columns: dict[str, list[Any]]
    state: TrainerState
    count: int


class Answered(_Message, frozen=True, kw_only=True):
    call: FunctionAnswer


class Raised(_Message, frozen=True, kw_only=True):
    """The function, or the model, raised: the kind of exception and its message."""

    error: str


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One conversation for a model: the prompt's text, what the policy said, and its tokens where they are needed. ``messages``:
    prompt and completion as messages, where the prompt is a conversation."""

    prompt: str = ""
    completion: str = ""
    messages: list[dict[str, Any]] = []
    tokens: list[int] = []


class Judge(_Message, frozen=True, kw_only=True):
    """Answered with Judged, or Raised."""

    samples: list[Sample]
    top: int = 0


class Step(msgspec.Struct, frozen=True):
    """Tokens [start, stop) of a completion, and what they are worth."""

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


class Judged(_Message, frozen=True, kw_only=True):
    opinions: list[Opinion]


Question = Ask | Judge
Answer = Ready | Refused | Answered | Judged | Raised


def frame(message: Question | Answer) -> bytes:
    """A message as it goes on the stream. TypeError for what has no place in one, ValueError for one too long."""
    body = msgspec.msgpack.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise ValueError(f"message of {len(body)} bytes; at most {MAX_FRAME_BYTES} are sent at once")
    return HEADER.pack(len(body)) + body
