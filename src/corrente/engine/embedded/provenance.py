"""What a live sequence collects about its draws besides their log-probs: kept sets and experts, token by token."""

from __future__ import annotations

from corrente.data.routing import Experts, Routing, nowhere
from corrente.data.support import Ids, Packed, Support, of_packed, pack


class Sets:
    """The kept sets of what was sampled so far. Each is packed as it comes, so that flat distributions take little room."""

    __slots__ = ("_packed", "_vocabulary")

    def __init__(self, vocabulary: int) -> None:
        self._vocabulary = vocabulary
        self._packed: list[Packed] = []

    def push(self, ids: Ids | None) -> None:
        self._packed.append(pack(ids, self._vocabulary))

    def support(self) -> Support:
        return of_packed(self._packed, vocabulary=self._vocabulary)


class Routes:
    """The experts of a sequence by position, of every token whose keys and values are cached.

    Two accounts: what each token was routed to when the next one was sampled from it, which is what a completion keeps; and
    what the cached keys and values went through, which differs once these were computed anew, and is what another sequence
    that borrows them has.
    """

    __slots__ = ("_cached", "_read", "_sampled_from")

    def __init__(self, context: Experts, *, room: int) -> None:
        self._sampled_from = nowhere(len(context) + room, context.shape[1:])
        self._sampled_from[: len(context)] = context
        self._cached = self._sampled_from
        self._read = len(context)

    def read(self, experts: Experts) -> None:
        """The next token went through the model, to ``experts`` (layers, choices)."""
        self._sampled_from[self._read] = experts
        self._cached[self._read] = experts
        self._read += 1

    def reread(self, experts: Experts) -> None:
        """All cached keys and values were computed anew, through ``experts``."""
        self._cached = self._sampled_from.copy()
        self._cached[: len(experts)] = experts

    def cached(self, tokens: int) -> Experts:
        """Of the first ``tokens`` tokens, as their keys and values have it."""
        return self._cached[:tokens]

    def routing(self, *, context: int, sampled: int) -> Routing:
        """Of a request of ``context`` tokens from which ``sampled`` were sampled."""
        first = context - 1
        return Routing(
            experts=self._sampled_from[first : first + sampled].copy(), context=self._sampled_from[:first].copy()
        )
