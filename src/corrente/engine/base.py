"""Who generates. Token ids in, token ids out; one Protocol for a model in this process and for a cluster of servers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import msgspec

from corrente.sync.base import Update
from corrente.types import Completion, Floats, Request, Tokens

ApplyMode = Literal["swap", "recompute"]
"""What becomes of live sequences when weights change: keep their key/value cache, or rebuild it under the new weights."""


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counters since the engine started, and what it holds now. ``busy_s`` is time spent computing."""

    version: int
    running: int = 0
    waiting: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    busy_s: float = 0.0


class Engine(Protocol):
    """Contract.

    - ``generate`` returns when the request stopped, ran out of budget or was aborted (``finish_reason``). The budget
      ``sampling.max_tokens`` is clipped to what the context has left; a prompt that leaves no room raises GenerationError.
      Every token is labelled with the version that sampled it. Cancelling the call frees the sequence.
    - The same request (tokens, sampling, seed) under the same weights yields the same tokens, whatever runs beside it, up to
      floating-point ties.
    - ``score`` returns the log-prob of tokens[1:] given what precedes each, untempered: shape (T-1,).
    - ``abort`` ends requests by id; their ``generate`` calls return what they have. Unknown ids are ignored.
    - ``apply`` makes ``update.version`` the sampling weights, between two decode steps, and returns the pause in seconds.
      After it returns every newly sampled token carries the new version. It is all or nothing: on an error (SyncError)
      the old weights are still in use.
    """

    async def generate(self, request: Request) -> Completion: ...

    async def score(self, tokens: Tokens) -> Floats: ...

    async def abort(self, ids: Sequence[str]) -> None: ...

    async def apply(self, update: Update, mode: ApplyMode) -> float: ...

    async def stats(self) -> EngineStats: ...
