"""The Engine protocol: token ids in, token ids out, for a model in this process and for a cluster of servers alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from corrente.data.types import Completion, Request, Scores, Tokens


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counters since the engine started, and its present state.

    ``version``: of the newest weights, -1 before the first. ``running`` and ``waiting`` count requests, ``prefill_tokens`` and
    ``decode_tokens`` computed tokens. ``busy_s``: seconds spent computing. ``ready``: engines of a pool that take requests.
    """

    version: int
    running: int = 0
    waiting: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    busy_s: float = 0.0
    ready: int = 1


class Engine(Protocol):
    """Contract. An engine receives its weights through sync.base.Receiver, which it implements as well.

    - ``generate`` returns when the request stopped, used up its budget or was aborted (``finish_reason``). The budget is
      ``sampling.max_tokens`` minus ``request.written``, clipped to what the context has left. A context without room raises
      GenerationError; a request whose budget is used up returns an empty completion. Every token is labelled with the version
      that sampled it. Cancelling the call frees the sequence.
    - The same request (tokens, sampling, seed) under the same weights yields the same tokens, whatever else is in the batch, up
      to floating-point ties. An aborted request that is resumed (``Request.resumed_after``) yields what it would have yielded
      without the interruption where the engine draws by position. The embedded engine does; vLLM draws from one random stream
      per request, so there this holds for greedy decoding only.
    - ``score`` returns the log-prob of each of tokens[1:] given the tokens before it, at temperature 1, and the ``top`` likeliest
      tokens at each place.
    - ``abort`` ends requests by id; their ``generate`` calls return what they have. Unknown ids are ignored.
    - ``partial_completions`` returns what the live requests among ``ids`` have so far (finish_reason "abort") and lets them go
      on. It leaves out an id that is not live or has sampled nothing yet.
    """

    async def generate(self, request: Request) -> Completion: ...

    async def score(self, tokens: Tokens, *, top: int = 0) -> Scores: ...

    async def abort(self, ids: Sequence[str]) -> None: ...

    async def partial_completions(self, ids: Sequence[str]) -> Mapping[str, Completion]: ...

    async def stats(self) -> EngineStats: ...
