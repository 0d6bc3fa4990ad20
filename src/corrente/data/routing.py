"""Which experts of a mixture each token was sent to.

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
"""In place of an expert: nothing was kept here, and the learner routes as its own weights say."""


class Routing(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The experts of a completion.

    ``experts`` (T, L, k): of the forward pass that each token was sampled from, which is the one over the token before it.
    ``context`` (N - 1, L, k): of the tokens before that, so that the learner can route a whole sequence as the engine did; no
    rows where an engine does not say. A place that is not known holds UNKNOWN throughout.

    Where keys and values were computed anew (recompute, or a resumed request), what later tokens looked at was routed by newer
    weights; what is kept is the pass a token was sampled from, which its recorded log-probability belongs to.
    """

    experts: Experts
    context: Experts

    def __post_init__(self) -> None:
        if self.experts.ndim != 3 or self.context.ndim != 3 or self.experts.shape[1:] != self.context.shape[1:]:
            raise AlignmentError(f"experts {self.experts.shape} and those of the context {self.context.shape} differ")

    def __len__(self) -> int:
        return len(self.experts)

    def check(self, tokens: Ids) -> None:
        """AlignmentError unless there are experts for each of ``tokens``."""
        if len(self) != len(tokens):
            raise AlignmentError(f"{len(tokens)} tokens but experts of {len(self)} in one completion")


def join_routings(first: Routing | None, rest: Routing | None, *, tokens: int, more: int) -> Routing | None:
    """Experts of ``tokens`` sampled tokens and of ``more`` after an interruption; the context is that of the first request."""
    known = rest if first is None else first
    if known is None:
        return None
    shape = known.experts.shape[1:]
    if first is not None and rest is not None and rest.experts.shape[1:] != shape:
        raise AlignmentError(f"experts of {shape} and of {rest.experts.shape[1:]} layers and choices cannot be joined")
    parts = [nowhere(count, shape) if part is None else part.experts for part, count in ((first, tokens), (rest, more))]
    begins = first is not None or not tokens
    return Routing(experts=np.concatenate(parts), context=known.context if begins else known.context[:0])


def nowhere(tokens: int, shape: tuple[int, ...]) -> Experts:
    """Experts of ``tokens`` tokens that are not known; ``shape``: (layers, choices)."""
    return np.full((tokens, *shape), UNKNOWN, np.int16)
