"""Who generates. Token ids in, token ids out; one Protocol for a model in this process and for a cluster of servers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from corrente.data.types import Completion, Request, Scores, Tokens


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counters since the engine started, and what it holds now. ``busy_s`` is time spent computing; ``ready`` counts engines
    that may be sent requests, of a pool."""

    version: int
    running: int = 0
    waiting: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    busy_s: float = 0.0
    ready: int = 1


class Engine(Protocol):
    """Contract. Weights come in by another door: an engine also implements sync.base.Receiver.

    - ``generate`` returns when the request stopped, ran out of budget or was aborted (``finish_reason``). The budget
      ``sampling.max_tokens``, less what ``request.written`` says is there already, is clipped to what the context has left; a
      context that leaves no room raises GenerationError, one whose budget is used up returns an empty completion.
      Every token is labelled with the version that sampled it. Cancelling the call frees the sequence.
    - The same request (tokens, sampling, seed) under the same weights yields the same tokens, whatever runs beside it, up to
      floating-point ties; an aborted request that goes on (``Request.after``) yields what it would have yielded undisturbed,
      where the engine draws by position (the embedded one does; vLLM draws from a stream, so only greedy decoding does there).
    - ``score`` returns the log-prob of tokens[1:] given what precedes each, untempered, and the ``top`` likeliest at each place.
    - ``abort`` ends requests by id; their ``generate`` calls return what they have. Unknown ids are ignored.
    - ``partials`` returns what the live requests among ``ids`` have so far (finish_reason "abort"), and lets them go on. An id
      that is not live, or has nothing yet, is left out.
    """

    async def generate(self, request: Request) -> Completion: ...

    async def score(self, tokens: Tokens, *, top: int = 0) -> Scores: ...

    async def abort(self, ids: Sequence[str]) -> None: ...

    async def partials(self, ids: Sequence[str]) -> Mapping[str, Completion]: ...

    async def stats(self) -> EngineStats: ...
