"""Recorded supports and experts of a micro-batch, aligned with the positions that are forwarded. numpy only.

Experts and the tree. A token that was sent to other experts is another computation, so two rows share a node only where tokens
*and* experts agree all the way: rows are folded by symbols, one for each distinct (token, experts). Completions of a group
whose prompt was read by one prefill share it as before; where the prompt was read twice, by different weights, and routed
differently, both readings are forwarded.

Supports and positions. Two trained tokens share a row of logits only where they were drawn from the same support.

Shapes: R rows, K trained tokens, M predicting positions, L layers with experts, k experts of a token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from corrente.data.routing import Experts, nowhere
from corrente.data.support import Support, join_supports
from corrente.data.types import Row, Tokens
from corrente.errors import AlignmentError

Index = NDArray[np.int64]


def experts_of(rows: Sequence[Row], contexts: Sequence[Tokens]) -> tuple[Experts, ...] | None:
    """Per row, the experts of its context (len, L, k); None where no row has any. AlignmentError where rows differ in L or k."""
    shapes = {row.experts.shape[1:] for row in rows if row.experts is not None}
    if not shapes:
        return None
    if len(shapes) > 1:
        raise AlignmentError(f"rows of one step have experts of {' and '.join(map(str, sorted(shapes)))}")
    shape = shapes.pop()
    return tuple(
        nowhere(len(context), shape) if row.experts is None else row.experts[: len(context)]
        for row, context in zip(rows, contexts, strict=True)
    )


def routed_symbols(contexts: Sequence[Tokens], experts: Sequence[Experts] | None) -> Sequence[Tokens]:
    """The contexts with each token replaced by a symbol: equal symbols stand for equal tokens sent to equal experts."""
    if experts is None:
        return contexts
    choices = np.concatenate(experts).reshape(sum(map(len, experts)), -1)
    tokens = np.concatenate(contexts).astype(np.int32)
    pairs = np.concatenate([tokens[:, None].view(np.int16), choices], 1)
    # one opaque value per (token, experts), so that np.unique compares whole rows
    opaque = np.ascontiguousarray(pairs).view(np.dtype((np.void, pairs.shape[1] * pairs.itemsize)))[:, 0]
    _, symbol = np.unique(opaque, return_inverse=True)
    stops = np.cumsum([len(context) for context in contexts])[:-1]
    return np.split(symbol.reshape(-1).astype(np.int32), stops)


def support_of(rows: Sequence[Row], where: Sequence[Index]) -> Support | None:
    """The supports of the trained tokens, row after row (K,); None where nothing was cut off."""
    parts = [None if row.support is None else row.support.take(at) for row, at in zip(rows, where, strict=True)]
    support = join_supports(parts, [len(at) for at in where])
    if support is not None:
        support.check(np.concatenate([row.tokens[at] for row, at in zip(rows, where, strict=True)]))
    return support


def prediction_slots(place_K: Index, support: Support | None) -> tuple[Index, Index, Support | None]:
    """Positions (M,) at which the tokens at ``place_K`` are predicted, the index of each token's position among them (K,), and
    the support of each position: one position for each distinct (place, support)."""
    if support is None:
        select_M, slot_K = np.unique(place_K, return_inverse=True)
        return select_M, slot_K.reshape(-1), None
    at = support.spans()
    keys = [
        (place, count, support.words[start:stop].tobytes())
        for place, count, start, stop in zip(
            place_K.tolist(), support.counts.tolist(), at[:-1].tolist(), at[1:].tolist(), strict=True
        )
    ]
    order = {key: index for index, key in enumerate(dict.fromkeys(keys))}
    slot_K = np.array([order[key] for key in keys], np.int64)
    _, first_M = np.unique(slot_K, return_index=True)
    return place_K[first_M], slot_K, support.take(first_M)
