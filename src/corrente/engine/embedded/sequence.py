"""One live sequence: what it was asked, what it has sampled, and what is known about its keys and values."""

from __future__ import annotations

import numpy as np

from corrente.data.routing import Experts, Routing
from corrente.data.support import Ids
from corrente.data.types import Completion, FinishReason, Request, Span, Tokens
from corrente.engine.embedded.provenance import Routes, Sets
from corrente.engine.embedded.stop import Decode, StopStrings, cut
from corrente.engine.embedded.weights import EmbeddedWeights


class LiveSequence:
    """A request being served. ``room`` is its budget, clipped to the context; ``kv`` the weights that computed all of its keys
    and values, None once they are mixed: only then may they be given to another sequence. The cache holds all of the tokens
    but the last. ``routes``: its experts, where the model has any that are recorded.
    """

    __slots__ = (
        "_context",
        "_length",
        "_logprobs",
        "_prompt",
        "_sets",
        "_spans",
        "_stop_ids",
        "_watch",
        "kv",
        "request",
        "room",
        "routes",
    )

    def __init__(
        self, request: Request, *, room: int, stop_ids: frozenset[int], decode: Decode | None, vocabulary: int
    ) -> None:
        self.request, self.room = request, room
        self.kv: EmbeddedWeights | None = None
        self._stop_ids = stop_ids
        self._watch = StopStrings(request.sampling.stop, decode) if request.sampling.stop and decode else None
        self._length = len(request.tokens)
        self._prompt = self._length - request.written
        self._context: Tokens = np.empty(self._length + max(room, 0), np.int32)
        self._context[: self._length] = request.tokens
        self._logprobs: list[float] = []
        self._spans: list[list[int]] = []
        sampling = request.sampling
        self._sets = Sets(vocabulary) if sampling.keep_support and sampling.cuts else None
        self.routes: Routes | None = None

    @property
    def length(self) -> int:
        """Tokens of prompt and completion so far."""
        return self._length

    @property
    def last(self) -> int:
        """The token whose keys and values are not in the cache yet."""
        return int(self._context[self._length - 1])

    @property
    def tokens(self) -> Tokens:
        return self._context[: self._length]

    @property
    def cached(self) -> Tokens:
        """The tokens whose keys and values the cache holds."""
        return self._context[: self._length - 1]

    @property
    def sampled(self) -> int:
        """Tokens sampled here; what was written before an interruption is not among them."""
        return len(self._logprobs)

    def over(self) -> FinishReason | None:
        """Whether nothing is to be sampled at all, and why: what was written before may have ended it. Once, before ``push``."""
        written = self._context[self._prompt : self._length].tolist()
        if written and written[-1] in self._stop_ids:
            return "stop"
        if written and self._watch is not None and self._watch.catch_up(written):
            return "stop"
        return "length" if self.room <= 0 else None

    def filled(self, experts: Experts | None) -> None:
        """All its tokens went through the model, to ``experts``, so that the next can be sampled."""
        if experts is not None:
            self.routes = Routes(experts, room=self.room)

    def push(self, token: int, logprob: float, version: int, kept: Ids | None = None) -> FinishReason | None:
        """Take a sampled token, and the ids it was drawn from; say whether it was the last, and why."""
        at = len(self._logprobs)
        self._context[self._length] = token
        self._length += 1
        self._logprobs.append(logprob)
        if self._sets is not None:
            self._sets.push(kept)
        if self._spans and self._spans[-1][0] == version:
            self._spans[-1][2] = at + 1
        else:
            self._spans.append([version, at, at + 1])
        if token in self._stop_ids or (self._watch is not None and self._watch.push(token)):
            return "stop"
        return "length" if at + 1 == self.room else None

    def complete(self, reason: FinishReason, decode: Decode | None) -> Completion:
        """What was sampled here, and the text of the whole."""
        return Completion(
            tokens=self._context[len(self.request.tokens) : self._length].copy(),
            logprobs=np.array(self._logprobs, np.float32),
            spans=tuple(Span(*span) for span in self._spans),
            finish_reason=reason,
            text=self._text(decode),
            support=self._sets.support() if self._sets is not None else None,
            routing=self._routing(),
        )

    def _routing(self) -> Routing | None:
        if self.routes is None:
            return None
        return self.routes.routing(context=len(self.request.tokens), sampled=self.sampled)

    def _text(self, decode: Decode | None) -> str:
        if decode is None:
            return ""
        tokens = self._context[self._prompt : self._length].tolist()
        said = tokens[:-1] if tokens and tokens[-1] in self._stop_ids else tokens
        return cut(decode(said), self.request.sampling.stop)
