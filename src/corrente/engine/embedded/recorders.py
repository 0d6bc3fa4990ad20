"""Record the supports and the experts of a live sequence, token by token.

Shapes: T cached tokens; layers and choices as in data/routing.py.
"""

from __future__ import annotations

from corrente.data.routing import Experts, Routing, unknown_experts
from corrente.data.support import Ids, PackedSet, Support, pack_ids, support_of_packed


class SupportRecorder:
    """Records the ids kept for each sampled token. Each set is packed at once, so that flat distributions take little room."""

    __slots__ = ("_packed", "_vocabulary")

    def __init__(self, vocabulary: int) -> None:
        self._vocabulary = vocabulary
        self._packed: list[PackedSet] = []

    def record_kept_ids(self, ids: Ids | None) -> None:
        self._packed.append(pack_ids(ids, self._vocabulary))

    def to_support(self) -> Support:
        return support_of_packed(self._packed, vocabulary=self._vocabulary)


class RoutingRecorder:
    """Records the experts of every cached token of a sequence.

    There are two records. One has the experts that read each token when the next one was sampled; a completion reports these. The
    other has the experts that computed the cached keys and values. They differ once the cache was rebuilt, and a sequence that
    copies the keys and values takes the second.
    """

    __slots__ = ("_cached", "_recorded_count", "_sampled_from")

    def __init__(self, context: Experts, *, max_new_tokens: int) -> None:
        self._sampled_from = unknown_experts(len(context) + max_new_tokens, context.shape[1:])
        self._sampled_from[: len(context)] = context
        self._cached = self._sampled_from
        self._recorded_count = len(context)

    def record_token(self, experts: Experts) -> None:
        """Record the experts (layers, choices) that read the next token."""
        self._sampled_from[self._recorded_count] = experts
        self._cached[self._recorded_count] = experts
        self._recorded_count += 1

    def record_rebuilt_cache(self, experts: Experts) -> None:
        """Record the experts (T, layers, choices) that computed all cached keys and values again."""
        self._cached = self._sampled_from.copy()
        self._cached[: len(experts)] = experts

    def cached_experts(self, tokens: int) -> Experts:
        """The experts that computed the keys and values of the first ``tokens`` tokens."""
        return self._cached[:tokens]

    def to_routing(self, *, context: int, sampled: int) -> Routing:
        """The routing of a request of ``context`` tokens after which ``sampled`` tokens were sampled."""
        first = context - 1
        return Routing(
            experts=self._sampled_from[first : first + sampled].copy(), context=self._sampled_from[:first].copy()
        )
