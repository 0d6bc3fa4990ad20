"""One live sequence: what it was asked, what it has sampled, and what is known about its keys and values."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from corrente.engine.embedded.stop import Decode, StopStrings, cut
from corrente.types import Completion, FinishReason, Floats, Request, Span, Tokens


class Live:
    """A request being served. ``room`` is its budget, clipped to the context.

    ``kv_version`` is the version whose weights computed all of its keys and values, None once they are mixed: only then may
    they be given to another sequence. The cache holds all of ``context`` but its last token.
    """

    __slots__ = ("_logprobs", "_spans", "_stop_ids", "_watch", "_written", "context", "kv_version", "request", "room")

    def __init__(self, request: Request, *, room: int, stop_ids: frozenset[int], decode: Decode | None) -> None:
        self.request, self.room = request, room
        self.kv_version: int | None = None
        self._stop_ids = stop_ids
        self._watch = StopStrings(request.sampling.stop, decode) if request.sampling.stop and decode else None
        prompt = len(request.tokens)
        self.context: Tokens = np.empty(prompt + room, np.int32)
        self.context[:prompt] = request.tokens
        self._written = prompt
        self._logprobs: list[float] = []
        self._spans: list[list[int]] = []

    @property
    def length(self) -> int:
        """Tokens of prompt and completion so far."""
        return self._written

    @property
    def tokens(self) -> Tokens:
        return self.context[: self._written]

    @property
    def cached(self) -> Tokens:
        """The tokens whose keys and values the cache holds."""
        return self.context[: self._written - 1]

    def push(self, token: int, logprob: float, version: int) -> FinishReason | None:
        """Take a sampled token; say whether it was the last, and why."""
        at = len(self._logprobs)
        self.context[self._written] = token
        self._written += 1
        self._logprobs.append(logprob)
        if self._spans and self._spans[-1][0] == version:
            self._spans[-1][2] = at + 1
        else:
            self._spans.append([version, at, at + 1])
        if token in self._stop_ids or (self._watch is not None and self._watch.push(token)):
            return "stop"
        return "length" if at + 1 == self.room else None

    def complete(self, reason: FinishReason, decode: Decode | None) -> Completion:
        tokens = self.context[len(self.request.tokens) : self._written].copy()
        logprobs: Floats = np.array(self._logprobs, np.float32)
        return Completion(
            tokens=tokens,
            logprobs=logprobs,
            spans=tuple(Span(*span) for span in self._spans),
            finish_reason=reason,
            text=self._text(tokens.tolist(), decode),
        )

    def _text(self, tokens: Sequence[int], decode: Decode | None) -> str:
        if decode is None:
            return ""
        said = tokens[:-1] if tokens and tokens[-1] in self._stop_ids else tokens
        return cut(decode(said), self.request.sampling.stop)
