"""The data that flows through the pipeline: frozen, keyword-only, numpy at most.

Prompt -> Request -> Completion -> Turn -> Episode -> Group -> Row -> Batch. Every sampled token keeps, from the engine to the
loss, the version of the weights that sampled it and the log-probability it was sampled with.

Shapes: T tokens of one completion, L tokens of one training row (prompt + completion), G episodes of a group, P groups of a step.
Arrays are int32 (tokens, versions), float32 (log-probs, advantages) or bool (masks). Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from corrente.errors import AlignmentError

Tokens = NDArray[np.int32]
Floats = NDArray[np.float32]
Mask = NDArray[np.bool_]

FinishReason = Literal["stop", "length", "abort"]
Outcome = Literal["trained", "filtered", "failed", "stale", "cancelled"]
"""How an admitted prompt ends: exactly one of these, with a reason and a count."""


class Sampling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How tokens are drawn. Log-probs are those of the distribution that results from all of these together.

    The order is: temperature, top_k, top_p, min_p (each on what the one before left), then renormalise. temperature 0 is
    greedy, and its log-probs are those of the untempered distribution. ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 switch off.
    """

    max_tokens: Annotated[int, Meta(ge=1)] = 64
    """Of one completion; clipped to what the context has left."""
    temperature: Annotated[float, Meta(ge=0)] = 1.0
    """Divides the logits; above 0 for training."""
    top_k: Annotated[int, Meta(ge=0)] = 0
    """Keep the k likeliest tokens."""
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Keep the fewest tokens whose probabilities reach this sum."""
    min_p: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    """Keep tokens at least this likely, relative to the likeliest."""
    stop_token_ids: tuple[int, ...] = ()
    """End a completion, besides the model's own end-of-sequence tokens."""
    stop: tuple[str, ...] = ()
    """End a completion where its text contains one of these; the text leaves it out."""


class Prompt(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One task. ``id`` is stable across runs and epochs ("<epoch>/<row>"); ``fields`` are the dataset's other columns."""

    id: str
    tokens: Tokens
    text: str = ""
    fields: dict[str, Any] = {}


class Span(msgspec.Struct, frozen=True):
    """Tokens [start, stop) were sampled by the weights of ``version``."""

    version: int
    start: int
    stop: int


class Request(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One completion to generate.

    ``tokens`` is the context (T0,). ``group`` names the prompt whose key/value cache its members share (equal group, equal
    prompt). ``seed`` makes the draw repeatable whatever else is in the batch.
    """

    id: str
    tokens: Tokens
    sampling: Sampling
    seed: int = 0
    group: str = ""


class Completion(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What the engine sampled: tokens (T,), logprobs (T,), and spans that partition [0, T).

    The end-of-sequence or stop token, when one was sampled, is the last of ``tokens``. ``text`` excludes it.
    """

    tokens: Tokens
    logprobs: Floats
    spans: tuple[Span, ...]
    finish_reason: FinishReason
    text: str = ""

    def __post_init__(self) -> None:
        count = len(self.tokens)
        if len(self.logprobs) != count:
            raise AlignmentError(f"{count} tokens but {len(self.logprobs)} log-probs in one completion")
        at = 0
        for span in self.spans:
            if span.start != at or span.stop <= span.start:
                raise AlignmentError(f"version spans {self.spans} do not partition [0, {count})")
            at = span.stop
        if at != count:
            raise AlignmentError(f"version spans {self.spans} do not partition [0, {count})")

    @property
    def versions(self) -> Tokens:
        """Version per token (T,)."""
        out = np.empty(len(self.tokens), np.int32)
        for span in self.spans:
            out[span.start : span.stop] = span.version
        return out


class Turn(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One speaker's contribution. ``completion`` is set when the policy sampled it; otherwise the tokens were given."""

    speaker: str
    tokens: Tokens
    completion: Completion | None = None
    parent: int | None = None


class Episode(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One playing of a prompt: a graph of turns (here: a path) and what it earned.

    ``scores`` keeps each reward function's own answer; None means "does not apply". ``reward`` is their combination, None when
    none applied. ``status`` is "ok", or the kind of failure with ``error`` saying which boundary failed and how.
    """

    prompt_id: str
    group_id: int
    index: int
    turns: tuple[Turn, ...] = ()
    scores: dict[str, float | None] = {}
    reward: float | None = None
    status: Literal["ok", "failed", "timeout", "cancelled"] = "ok"
    error: str = ""
    metrics: dict[str, float] = {}

    @property
    def completions(self) -> tuple[Completion, ...]:
        return tuple(turn.completion for turn in self.turns if turn.completion is not None)

    @property
    def text(self) -> str:
        """What the policy said, turn after turn."""
        return "".join(c.text for c in self.completions)

    @property
    def sampled_tokens(self) -> int:
        return sum(len(c.tokens) for c in self.completions)

    @property
    def truncated(self) -> bool:
        return any(c.finish_reason == "length" for c in self.completions)

    def span_versions(self) -> tuple[int, ...]:
        return tuple(span.version for c in self.completions for span in c.spans)


class Group(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The surviving episodes of one prompt: the unit of admission, scoring and advantage.

    ``id`` is its admission number, unique in a run and never reused. ``admitted_version`` was live when it was admitted.
    """

    id: int
    prompt: Prompt
    episodes: tuple[Episode, ...]
    admitted_version: int

    @property
    def oldest_version(self) -> int:
        """Version of the oldest sampled token; of admission when nothing was sampled."""
        return min((v for e in self.episodes for v in e.span_versions()), default=self.admitted_version)

    @property
    def rewards(self) -> tuple[float | None, ...]:
        return tuple(episode.reward for episode in self.episodes)

    @property
    def sampled_tokens(self) -> int:
        return sum(e.sampled_tokens for e in self.episodes)


class Row(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One sequence to train on: everything aligned with ``tokens`` (L,).

    ``loss_mask`` (L,) marks sampled tokens that may be trained on; ``logprobs``, ``versions`` and ``advantages`` (L,) are
    meaningful where it is set, and zero elsewhere.
    """

    group: int
    tokens: Tokens
    loss_mask: Mask
    logprobs: Floats
    versions: Tokens
    advantages: Floats

    def __post_init__(self) -> None:
        length = len(self.tokens)
        for name in ("loss_mask", "logprobs", "versions", "advantages"):
            if len(getattr(self, name)) != length:
                raise AlignmentError(f"row of {length} tokens has {len(getattr(self, name))} {name}")


class Batch(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One optimizer step's rows. ``version`` is that of the policy the step starts from; ``sequences`` counts all episodes
    that entered the step, also those whose rows carry no gradient (it is the denominator of sequence-level means)."""

    step: int
    version: int
    rows: tuple[Row, ...]
    sequences: int
    tokens: int
    """Sampled tokens of all those episodes: the denominator of token-level means."""

    def lags(self) -> Tokens:
        """Lag of every trained token, concatenated: ``version`` minus the version that sampled it."""
        parts = [self.version - row.versions[row.loss_mask] for row in self.rows]
        return np.concatenate(parts) if parts else np.empty(0, np.int32)


def concat_tokens(parts: Sequence[Tokens]) -> Tokens:
    """Concatenate token arrays; empty input gives an empty int32 array."""
    return np.concatenate([np.asarray(p, np.int32) for p in parts]) if parts else np.empty(0, np.int32)


Metrics = Mapping[str, float]
