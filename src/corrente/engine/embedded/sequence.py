"""One live sequence: its request, the tokens it has sampled, and the state of its keys and values."""

from __future__ import annotations

import numpy as np

from corrente.data.routing import Experts, Routing
from corrente.data.support import Ids
from corrente.data.types import Completion, FinishReason, Request, Span, Tokens
from corrente.engine.embedded.recorders import RoutingRecorder, SupportRecorder
from corrente.engine.embedded.stop_conditions import Decode, StopStrings, cut_at_stop
from corrente.engine.embedded.weights import EmbeddedWeights
from corrente.errors import GenerationError


def check_request(request: Request, *, vocabulary: int, has_tokenizer: bool) -> None:
    """Raise GenerationError for a request that no engine with ``vocabulary`` tokens can serve."""
    who, tokens = f"request {request.id}", request.tokens
    if len(tokens) <= request.written:
        raise GenerationError(f"{who}: the prompt is empty")
    if request.written < 0:
        raise GenerationError(f"{who}: written is {request.written}; it counts tokens, from 0 on")
    if tokens.min() < 0 or tokens.max() >= vocabulary:
        raise GenerationError(f"{who}: token ids must lie in [0, {vocabulary})")
    if request.sampling.stop and not has_tokenizer:
        raise GenerationError(f"{who}: stop strings need a tokenizer, and the model has none")


class LiveSequence:
    """A request being served.

    ``max_new_tokens``: its budget, clipped to the context. ``kv_weights``: the weights that computed all of its keys and values;
    None once these are mixed, and then no other sequence may copy them. The cache holds every token but the last.
    ``routing_recorder``: records its experts; None where the model records none.
    """

    __slots__ = (
        "_context",
        "_length",
        "_logprobs",
        "_prompt",
        "_spans",
        "_stop_ids",
        "_stop_strings",
        "_support_recorder",
        "kv_weights",
        "max_new_tokens",
        "request",
        "routing_recorder",
    )

    def __init__(
        self, request: Request, *, max_new_tokens: int, stop_ids: frozenset[int], decode: Decode | None, vocabulary: int
    ) -> None:
        self.request, self.max_new_tokens = request, max_new_tokens
        self.kv_weights: EmbeddedWeights | None = None
        self._stop_ids = stop_ids
        self._stop_strings = StopStrings(request.sampling.stop, decode) if request.sampling.stop and decode else None
        self._length = len(request.tokens)
        self._prompt = self._length - request.written
        self._context: Tokens = np.empty(self._length + max(max_new_tokens, 0), np.int32)
        self._context[: self._length] = request.tokens
        self._logprobs: list[float] = []
        self._spans: list[list[int]] = []
        sampling = request.sampling
        self._support_recorder = SupportRecorder(vocabulary) if sampling.keep_support and sampling.truncates else None
        self.routing_recorder: RoutingRecorder | None = None

    @property
    def length(self) -> int:
        """The number of tokens of prompt and completion so far."""
        return self._length

    @property
    def last_token(self) -> int:
        """The token whose keys and values are not in the cache yet."""
        return int(self._context[self._length - 1])

    @property
    def tokens(self) -> Tokens:
        return self._context[: self._length]

    @property
    def cached_tokens(self) -> Tokens:
        """The tokens whose keys and values the cache holds."""
        return self._context[: self._length - 1]

    @property
    def sampled_count(self) -> int:
        """The number of tokens sampled for this request, without those sampled before an interruption."""
        return len(self._logprobs)

    def finish_reason_before_sampling(self) -> FinishReason | None:
        """The finish reason of a resumed request that ended before it was interrupted, or that has no budget; else None.

        Call it once, before the first ``push_token``: it also feeds the stop strings with the tokens sampled before.
        """
        written = self._context[self._prompt : self._length].tolist()
        if written and written[-1] in self._stop_ids:
            return "stop"
        if written and self._stop_strings is not None and self._stop_strings.push_all(written):
            return "stop"
        return "length" if self.max_new_tokens <= 0 else None

    def start_decoding(self, experts: Experts | None) -> None:
        """Note that the prefill of all its tokens is done; ``experts`` (T, layers, choices) are those it went through."""
        if experts is not None:
            self.routing_recorder = RoutingRecorder(experts, max_new_tokens=self.max_new_tokens)

    def push_token(self, token: int, logprob: float, version: int, kept: Ids | None = None) -> FinishReason | None:
        """Add a sampled token and the ids it was drawn from; returns the finish reason if it was the last token."""
        at = len(self._logprobs)
        self._context[self._length] = token
        self._length += 1
        self._logprobs.append(logprob)
        if self._support_recorder is not None:
            self._support_recorder.record_kept_ids(kept)
        if self._spans and self._spans[-1][0] == version:
            self._spans[-1][2] = at + 1
        else:
            self._spans.append([version, at, at + 1])
        if token in self._stop_ids or (self._stop_strings is not None and self._stop_strings.push_token(token)):
            return "stop"
        return "length" if at + 1 == self.max_new_tokens else None

    def to_completion(self, reason: FinishReason, decode: Decode | None) -> Completion:
        """The completion: the tokens sampled for this request, with the text of the whole completion."""
        return Completion(
            tokens=self._context[len(self.request.tokens) : self._length].copy(),
            logprobs=np.array(self._logprobs, np.float32),
            spans=tuple(Span(*span) for span in self._spans),
            finish_reason=reason,
            text=self._decode_text(decode),
            support=self._support_recorder.to_support() if self._support_recorder is not None else None,
            routing=self._to_routing(),
        )

    def _to_routing(self) -> Routing | None:
        if self.routing_recorder is None:
            return None
        return self.routing_recorder.to_routing(context=len(self.request.tokens), sampled=self.sampled_count)

    def _decode_text(self, decode: Decode | None) -> str:
        if decode is None:
            return ""
        tokens = self._context[self._prompt : self._length].tolist()
        shown = tokens[:-1] if tokens and tokens[-1] in self._stop_ids else tokens
        return cut_at_stop(decode(shown), self.request.sampling.stop)
