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

from corrente.data.routing import Experts, Routing, join_routings
from corrente.data.support import Support, join_supports
from corrente.errors import AlignmentError

Tokens = NDArray[np.int32]
Floats = NDArray[np.float32]
Mask = NDArray[np.bool_]

FinishReason = Literal["stop", "length", "abort"]
GroupOutcome = Literal["trained", "filtered", "failed", "stale", "cancelled"]
"""An admitted prompt ends in exactly one of these outcomes, with a reason and a count."""
ApplyMode = Literal["swap", "recompute", "snapshot"]
"""The treatment of live sequences when weights change. swap: continue under the new weights with the present key/value cache.
recompute: rebuild the cache under the new weights, then continue. snapshot: finish under the old weights; only new requests use
the new ones."""

LARGEST_REWARD = 1e18
"""The largest absolute value of a reward; the square of a larger one overflows float32."""


class Sampling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters of drawing tokens. Log-probs are those of the distribution that results from all of these together.

    They apply in the order temperature, top_k, top_p, min_p, each to the tokens that the one before left; then the rest is
    renormalised. Temperature 0 is greedy, and its log-probs are those of the distribution at temperature 1. ``top_k`` 0,
    ``top_p`` 1 and ``min_p`` 0 switch these off.
    """

    max_tokens: Annotated[int, Meta(ge=1)] = 64
    """The longest completion, in tokens; clipped to what the context has left."""
    temperature: Annotated[float, Meta(ge=0)] = 1.0
    """Divides the logits; above 0 for training."""
    top_k: Annotated[int, Meta(ge=0)] = 0
    """Keep the k likeliest tokens."""
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Keep the fewest tokens whose probabilities reach this sum."""
    min_p: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    """Keep tokens at least this likely, relative to the likeliest."""
    keep_support: bool = True
    """Keep the ids that top_k, top_p and min_p leave of each draw, so that the learner renormalises over the same ones."""
    stop_token_ids: tuple[int, ...] = ()
    """End a completion, besides the end-of-sequence tokens of the model and its tokenizer."""
    stop: tuple[str, ...] = ()
    """End a completion where its text contains one of these, or where a special token is one; the text leaves it out."""

    @property
    def truncates(self) -> bool:
        """True when some tokens cannot be drawn, because top_k, top_p or min_p cuts them off."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)


class Prompt(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One task. ``id`` is stable across runs and epochs ("<epoch>/<row>"); ``fields`` are the dataset's other columns.

    ``text`` is what the model reads, rendered; ``messages`` is the conversation it was rendered from (role and content), empty
    where the prompt is plain text.
    """

    id: str
    tokens: Tokens
    text: str = ""
    messages: tuple[dict[str, Any], ...] = ()
    fields: dict[str, Any] = {}


class Span(msgspec.Struct, frozen=True):
    """Tokens [start, stop) were sampled by the weights of ``version``."""

    version: int
    start: int
    stop: int


class Request(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One completion to generate, from its beginning or from where an interruption left it.

    ``tokens`` (T0,) is the context. ``group`` names the prompt whose key/value cache its members share (equal group, equal
    prompt). ``seed`` makes the draw repeatable whatever else is in the batch: a token's draw depends only on the seed and on its
    position. ``written``: the number of tokens at the end of ``tokens`` that belong to the completion, because they were sampled
    before an interruption. They count against ``sampling.max_tokens`` and stop strings see them; they are not returned again.
    """

    id: str
    tokens: Tokens
    sampling: Sampling
    seed: int = 0
    group: str = ""
    written: int = 0

    def resumed_after(self, partial: Completion) -> Request:
        """The request that continues where ``partial``, an aborted completion of this request, ends."""
        tokens = np.concatenate([self.tokens, partial.tokens])
        return msgspec.structs.replace(self, tokens=tokens, written=self.written + len(partial.tokens))


class Completion(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The tokens (T,) that the engine sampled for a request, their logprobs (T,), and version spans that partition [0, T).

    The end-of-sequence or stop token, when one was sampled, is the last of ``tokens``. ``text`` excludes it; for a resumed
    request it is the text of the whole completion, with the tokens from before the interruption. ``support``: the token sets that
    were drawn from; None where nothing was cut off. ``routing``: the experts of a mixture; None where they are not recorded.
    AlignmentError when the arrays do not describe the same tokens.
    """

    tokens: Tokens
    logprobs: Floats
    spans: tuple[Span, ...]
    finish_reason: FinishReason
    text: str = ""
    support: Support | None = None
    routing: Routing | None = None

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
        for kept in (self.support, self.routing):
            if kept is not None:
                kept.check_aligned(self.tokens)

    def joined_with(self, rest: Completion) -> Completion:
        """Return this completion followed by ``rest``, which resumed it, as one; adjacent spans of one version become one."""
        spans, at = list(self.spans), len(self.tokens)
        for span in rest.spans:
            moved = Span(span.version, span.start + at, span.stop + at)
            if spans and spans[-1].version == moved.version:
                moved = Span(moved.version, spans.pop().start, moved.stop)
            spans.append(moved)
        return Completion(
            tokens=np.concatenate([self.tokens, rest.tokens]),
            logprobs=np.concatenate([self.logprobs, rest.logprobs]),
            spans=tuple(spans),
            finish_reason=rest.finish_reason,
            text=rest.text,
            support=join_supports([self.support, rest.support], [at, len(rest.tokens)]),
            routing=join_routings(self.routing, rest.routing, tokens=at, more=len(rest.tokens)),
        )

    @property
    def versions(self) -> Tokens:
        """The version that sampled each token (T,)."""
        out = np.empty(len(self.tokens), np.int32)
        for span in self.spans:
            out[span.start : span.stop] = span.version
        return out


def _check_top_logprobs(logprobs: Floats, top_ids: Tokens, top_logprobs: Floats, *, of: str) -> None:
    count = len(logprobs)
    if not top_ids.shape == top_logprobs.shape == (count, top_ids.shape[-1]):
        raise AlignmentError(f"{count} log-probs, top {top_ids.shape} and {top_logprobs.shape} of {of}")


class Scores(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Log-probs of given tokens (T,) at temperature 1. ``logprobs`` (T-1,): those of tokens[1:], each given the tokens before it.

    ``top_ids`` and ``top_logprobs`` (T-1, K): the K likeliest tokens at the same places, likeliest first; K = 0 unless asked for.
    ``version``: that of the weights, where they have one.
    """

    logprobs: Floats
    top_ids: Tokens
    top_logprobs: Floats
    version: int | None = None

    def __post_init__(self) -> None:
        _check_top_logprobs(self.logprobs, self.top_ids, self.top_logprobs, of="one score")


class Turn(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One speaker's turn in an episode. ``completion`` is set when the policy sampled it; otherwise only its tokens are known.

    ``parent``: the index of the turn it follows, whose path is its context. None: the turn before it. -1: it starts a new
    context.
    """

    speaker: str
    tokens: Tokens
    completion: Completion | None = None
    parent: int | None = None


class StepScore(msgspec.Struct, frozen=True):
    """The score of a process reward for tokens [start, stop) of the completion of ``turn``, an index into Episode.turns."""

    turn: int
    start: int
    stop: int
    score: float


class TeacherLogprobs(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One teacher's log-probs of the tokens of a sampled turn, or of a row (L,), each token given all that precedes it.

    ``logprobs`` (L,) are of the tokens in place, at the teacher's own temperature; ``top_ids`` and ``top_logprobs`` (L, J) are
    the teacher's J likeliest tokens at the same places, likeliest first; J = 0 unless asked for. In a row all three are zero
    where the row's ``loss_mask`` is not set. ``teacher``: the name of the scorer. ``weight``: how much it counts among other
    teachers. ``turn``: index into Episode.turns; None in a row, which may join several turns. ``version``: of the teacher's
    weights, where they have one. Raises AlignmentError where the arrays differ in length.
    """

    teacher: str
    logprobs: Floats
    top_ids: Tokens
    top_logprobs: Floats
    weight: float = 1.0
    turn: int | None = None
    version: int | None = None

    def __post_init__(self) -> None:
        _check_top_logprobs(self.logprobs, self.top_ids, self.top_logprobs, of=f"teacher {self.teacher}")


class Episode(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One attempt at a prompt: a graph of turns, and the rewards it earned.

    A turn's context is the path of its ancestors. The graph is one path unless the conversation was rendered anew.
    ``messages``: the chat messages after the prompt; empty for one plain completion. ``opening``: the text before the first turn
    where tools or an environment added to the prompt's text. ``env_rewards``: the environment's own rewards by name; the scorer
    adds them with weight 1. ``agent_rewards``: the reward of each speaker where several agents play. ``cut``: the episode ended
    because no token was left, although no completion was cut by length. ``environment``: the live environment, for reward
    functions; None once the episode is scored.

    ``scores``: each scorer's own score; None means "does not apply". ``reward``: the combination of the scores; None when none
    applied. ``step_scores``: the places in the completions where process rewards were earned; weights are applied already, the
    scores of several scorers add up, and tokens outside all of them earned nothing of their own. ``taught``: an entry per teacher
    and sampled turn. ``extra``: values that reward functions log with the episode. ``status``: "ok" or the kind of failure, and
    then ``error`` says what failed and how.
    """

    prompt_id: str
    group_id: int
    index: int
    turns: tuple[Turn, ...] = ()
    messages: tuple[dict[str, Any], ...] = ()
    opening: str = ""
    scores: dict[str, float | None] = {}
    reward: float | None = None
    env_rewards: dict[str, float | None] = {}
    agent_rewards: dict[str, float] = {}
    step_scores: tuple[StepScore, ...] = ()
    taught: tuple[TeacherLogprobs, ...] = ()
    extra: dict[str, Any] = {}
    cut: bool = False
    environment: Any = None
    status: Literal["ok", "failed", "timeout", "cancelled"] = "ok"
    error: str = ""
    metrics: dict[str, float] = {}

    @property
    def completions(self) -> tuple[Completion, ...]:
        return tuple(turn.completion for turn in self.turns if turn.completion is not None)

    @property
    def text(self) -> str:
        """The text of the policy's completions, one after another."""
        return "".join(c.text for c in self.completions)

    @property
    def sampled_tokens(self) -> int:
        return sum(len(c.tokens) for c in self.completions)

    @property
    def truncated(self) -> bool:
        """True when the episode ended because no token was left."""
        return self.cut or any(c.finish_reason == "length" for c in self.completions)

    def sampled_versions(self) -> tuple[int, ...]:
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
        """The version of the oldest sampled token; that of admission when nothing was sampled."""
        return min((v for e in self.episodes for v in e.sampled_versions()), default=self.admitted_version)

    @property
    def rewards(self) -> tuple[float | None, ...]:
        return tuple(episode.reward for episode in self.episodes)

    @property
    def sampled_tokens(self) -> int:
        return sum(e.sampled_tokens for e in self.episodes)


class Row(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One sequence to train on, every array aligned with ``tokens`` (L,).

    ``loss_mask`` (L,) marks sampled tokens that may be trained on; ``logprobs``, ``versions`` and ``advantages`` (L,) are
    meaningful where it is set, and zero elsewhere. ``teachers``: one entry per teacher of the episode. ``support``: the sets the
    tokens were drawn from; None: nothing was cut off. ``experts`` (L, layers, k): the experts that read each token, as far as
    they are known; None: the learner's routers decide. ``mixed`` (L,): True for tokens sampled after new weights landed in the
    middle of their completion, so that tokens of an older version precede them; None: there are none. ``share``: the fraction of
    its sequence's trained tokens that is in this row, below 1 where one agent's tokens are in several rows of a forked
    conversation, which count as one sequence. Where several agents are in one row, the sum of their shares.
    ``sequence_tokens``: sampled tokens of its sequence in all its rows, also those too old to be trained on: the divisor of a
    mean over the sequence. Where several agents are in one row, their mean, so that each counts as one; 0: the trained tokens.
    """

    group: int
    tokens: Tokens
    loss_mask: Mask
    logprobs: Floats
    versions: Tokens
    advantages: Floats
    teachers: tuple[TeacherLogprobs, ...] = ()
    support: Support | None = None
    experts: Experts | None = None
    mixed: Mask | None = None
    share: float = 1.0
    sequence_tokens: float = 0.0

    def __post_init__(self) -> None:
        length = len(self.tokens)
        for name in ("loss_mask", "logprobs", "versions", "advantages", "support", "experts", "mixed"):
            value = getattr(self, name)
            if value is not None and len(value) != length:
                raise AlignmentError(f"row of {length} tokens has {len(value)} {name}")
        for teacher in self.teachers:
            if len(teacher.logprobs) != length:
                raise AlignmentError(f"row of {length} tokens has {len(teacher.logprobs)} logprobs of a teacher")


class Batch(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The rows of one optimizer step.

    ``version``: that of the policy the step starts from. ``sequences``: the number of all episodes of the step, with those whose
    rows carry no gradient; it is the denominator of sequence-level means.
    """

    step: int
    version: int
    rows: tuple[Row, ...]
    sequences: int
    tokens: int
    """The number of sampled tokens of all those episodes: the denominator of token-level means."""

    def lags(self) -> Tokens:
        """The lag of every trained token, concatenated (K,): ``version`` minus the version that sampled it."""
        parts = [self.version - row.versions[row.loss_mask] for row in self.rows]
        return np.concatenate(parts) if parts else np.empty(0, np.int32)


def concat_tokens(parts: Sequence[Tokens]) -> Tokens:
    """Concatenate token arrays; empty input gives an empty int32 array."""
    return np.concatenate([np.asarray(p, np.int32) for p in parts]) if parts else np.empty(0, np.int32)


Metrics = Mapping[str, float]
