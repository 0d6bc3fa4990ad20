"""The experts of a mixture that each token was sent to.

A router sends each token to k of E experts, layer by layer. Rounding, or one update of the weights, sends some tokens to other
experts, and the log-probs of engine and learner drift apart. So the engine's choice is recorded and the learner replays it.

Shapes: T sampled tokens, N tokens of context, L layers with experts, k experts of a token.
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from corrente.data.support import Ids
from corrente.errors import AlignmentError

Experts = NDArray[np.int16]


UNKNOWN = -1
"""Stands for an expert that was not recorded: the learner's own router decides there."""


class Routing(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The experts of a completion.

    ``experts`` (T, L, k): those of the forward pass that each token was sampled from, which is the pass over the token before it.
    ``context`` (N - 1, L, k): those of the earlier tokens, so that the learner can route a whole sequence as the engine did; no
    rows where an engine does not report them. An unknown place holds UNKNOWN throughout.

    Where keys and values were computed again (recompute, or a resumed request), newer weights routed the context that later
    tokens attended to. Recorded is the pass that a token was sampled from, to which its log-probability belongs.
    """

    experts: Experts
    context: Experts

    def __post_init__(self) -> None:
        if self.experts.ndim != 3 or self.context.ndim != 3 or self.experts.shape[1:] != self.context.shape[1:]:
            raise AlignmentError(f"experts {self.experts.shape} and those of the context {self.context.shape} differ")

    def __len__(self) -> int:
        return len(self.experts)

    def check_aligned(self, tokens: Ids) -> None:
        """Raise AlignmentError unless there are experts for each of ``tokens`` (T,)."""
        if len(self) != len(tokens):
            raise AlignmentError(f"{len(tokens)} tokens but experts of {len(self)} in one completion")


def join_routings(first: Routing | None, rest: Routing | None, *, tokens: int, more: int) -> Routing | None:
    """Join the experts of ``tokens`` sampled tokens and of ``more`` tokens sampled after an interruption.

    The context is that of the first request. None where neither part has experts; AlignmentError where their shapes differ.
    """
    known = rest if first is None else first
    if known is None:
        return None
    shape = known.experts.shape[1:]
    if first is not None and rest is not None and rest.experts.shape[1:] != shape:
        raise AlignmentError(f"experts of {shape} and of {rest.experts.shape[1:]} layers and choices cannot be joined")
    parts = [
        unknown_experts(count, shape) if part is None else part.experts
        for part, count in ((first, tokens), (rest, more))
    ]
    begins = first is not None or not tokens
    return Routing(experts=np.concatenate(parts), context=known.context if begins else known.context[:0])


def unknown_experts(tokens: int, shape: tuple[int, ...]) -> Experts:
    """An array of UNKNOWN (tokens, L, k) for tokens whose experts were not recorded; ``shape`` is (L, k)."""
    return np.full((tokens, *shape), UNKNOWN, np.int16)
