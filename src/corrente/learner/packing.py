"""Rows of an optimizer step, cut into micro-batches in which every distinct prefix is forwarded once. numpy only.

Legend: R rows of the step, K trained tokens of a micro-batch (flat, row after row), M positions of it whose logits are needed,
N positions forwarded.

A token is predicted at the position before it, so a row enters the forward pass only up to its last trained token, exclusive.
Rows are sorted so that those with a common prefix are neighbours, groups first, and micro-batches are cut between groups
wherever a group fits. The cut does not change the gradient: the weight of a token holds the step's denominator already.
The supports and experts that engines recorded come along; tokens with other experts are distinct (provenance.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from corrente.algo.teacher_logprobs import RowTeachers, take_positions
from corrente.data.prefix_tree import Index, Tree, fold
from corrente.data.routing import Experts, nowhere
from corrente.data.support import Support
from corrente.data.types import Floats, Mask, Row, Tokens
from corrente.errors import AlignmentError, DivergedError
from corrente.learner import provenance


class Pack(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One micro-batch. Trained token k is predicted at position ``row_K[k], at_K[k]`` of ``contexts``."""

    contexts: tuple[Tokens, ...]
    row_K: Index
    at_K: Index
    targets_K: Index
    behaviour_K: Floats
    advantages_K: Floats
    weights_K: NDArray[np.float64]
    lags_K: Tokens
    mixed_K: Mask
    teachers_R: tuple[RowTeachers, ...] = ()
    """Per row, the teachers' log-probs of its trained tokens; empty where the loss does not read them."""
    support: Support | None = None
    """The support of each of the K; None: nothing was cut off."""
    experts: tuple[Experts, ...] | None = None
    """The experts that the tokens of each context were sent to; None: the router chooses."""
    symbols: tuple[Tokens, ...] | None = None
    """The contexts as they are folded, with ``experts``; see provenance.routed_symbols."""

    @property
    def counts_R(self) -> list[int]:
        """Trained tokens of each row."""
        return np.bincount(self.row_K, minlength=len(self.contexts)).tolist()


class PackInputs(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Inputs of the model for one micro-batch: tokens (B, N) and their positions (B, N).

    ``tree``: the prefix tree they come from (then B is 1); ``mask`` (B, N): of padded rows. ``select_M``: the positions among the
    B * N that predict; ``slot_K``: for every trained token the index of its position among the M. ``support``: of the M.
    ``experts`` (B * N, layers, k). ``times`` (B * N,): number of rows that share a position.
    """

    tokens: Tokens
    positions: Index
    select_M: Index
    slot_K: Index
    times: Index
    tree: Tree | None = None
    mask: Mask | None = None
    support: Support | None = None
    experts: Experts | None = None


def plan_packs(
    rows: Sequence[Row], *, weights_R: NDArray[np.float64], version: int, budget: int, teachers: bool = False
) -> tuple[Pack, ...]:
    """Cut rows into micro-batches of at most ``budget`` distinct tokens; a single row longer than that is not split.

    ``weights_R``: factor of each row's token losses. ``version``: of the policy the step starts from. ``teachers``: whether the
    rows' teacher log-probs come along. Raises AlignmentError for a trained token without context, DivergedError for a recorded
    value that is not finite.
    """
    for row in rows:
        _check(row)
    contexts = [row.tokens[: np.flatnonzero(row.loss_mask)[-1]] for row in rows]
    symbols = provenance.routed_symbols(contexts, provenance.experts_of(rows, contexts)) if rows else contexts
    return tuple(
        _pack([rows[r] for r in cut], [contexts[r] for r in cut], weights_R[list(cut)], version, teachers=teachers)
        for cut in _cuts(rows, symbols, budget)
    )


def as_tree(pack: Pack) -> PackInputs:
    """Lay the micro-batch out as one sequence of its distinct prefixes."""
    tree: Tree = fold(pack.contexts if pack.symbols is None else pack.symbols)
    node_K = np.array([tree.paths[r][at] for r, at in zip(pack.row_K, pack.at_K, strict=True)], np.int64)
    select_M, slot_K, support_M = provenance.prediction_slots(node_K, pack.support)
    nodes = np.concatenate(tree.paths)
    tokens = np.empty(len(tree), np.int32)
    tokens[nodes] = np.concatenate(pack.contexts)
    experts = None
    if pack.experts is not None:
        experts = nowhere(len(tree), pack.experts[0].shape[1:])
        experts[nodes] = np.concatenate(pack.experts)
    return PackInputs(
        tokens=tokens[None],
        positions=tree.positions[None],
        select_M=select_M,
        slot_K=slot_K,
        times=np.bincount(nodes, minlength=len(tree)),
        tree=tree,
        support=support_M,
        experts=experts,
    )


def as_rows(pack: Pack) -> PackInputs:
    """Lay the micro-batch out as rows padded on the right, for models that take no mask of our making."""
    length = max(len(context) for context in pack.contexts)
    tokens = np.zeros((len(pack.contexts), length), np.int32)
    mask = np.zeros(tokens.shape, np.bool_)
    for r, context in enumerate(pack.contexts):
        tokens[r, : len(context)] = context
        mask[r, : len(context)] = True
    experts = None
    if pack.experts is not None:
        experts = nowhere(tokens.size, pack.experts[0].shape[1:])
        experts[mask.flatten()] = np.concatenate(pack.experts)
    return PackInputs(
        tokens=tokens,
        positions=np.tile(np.arange(length), (len(tokens), 1)),
        select_M=pack.row_K * length + pack.at_K,
        slot_K=np.arange(len(pack.row_K)),
        times=mask.flatten().astype(np.int64),
        mask=mask,
        support=pack.support,
        experts=experts,
    )


def padded_tokens(rows: Sequence[Row]) -> int:
    """Number of positions that one batch padded to its longest row would forward."""
    return len(rows) * max((len(row.tokens) for row in rows), default=0)


def _check(row: Row) -> None:
    if not row.loss_mask.any():
        raise AlignmentError(f"a row of group {row.group} has no trained token")
    if row.loss_mask[0]:
        raise AlignmentError(f"a row of group {row.group} trains on its first token, which nothing predicts")
    for name in ("logprobs", "advantages"):
        if not np.isfinite(getattr(row, name)[row.loss_mask]).all():
            raise DivergedError(f"{name} of a trained token of group {row.group} are not finite")


def _cuts(rows: Sequence[Row], contexts: Sequence[Tokens], budget: int) -> Iterator[list[int]]:
    """Indices of the rows of each micro-batch, in sorted order."""
    current: list[int] = []
    used = 0
    for unit in _units(rows, contexts):
        fresh = _distinct(contexts, unit)
        if current and fresh <= budget < used + _distinct(contexts, unit, after=current[-1]):
            yield current
            current, used = [], 0
        for r in unit:
            added = _distinct(contexts, [r], after=current[-1] if current else None)
            if current and used + added > budget:
                yield current
                current, used, added = [], 0, len(contexts[r])
            current.append(r)
            used += added
    if current:
        yield current


def _units(rows: Sequence[Row], contexts: Sequence[Tokens]) -> list[list[int]]:
    """Rows by group, sorted inside; groups sorted by their first row, so that common prefixes are neighbours."""
    groups: dict[int, list[int]] = {}
    keys = [context.tolist() for context in contexts]
    for r in sorted(range(len(rows)), key=keys.__getitem__):
        groups.setdefault(rows[r].group, []).append(r)
    return list(groups.values())


def _distinct(contexts: Sequence[Tokens], unit: Sequence[int], *, after: int | None = None) -> int:
    """Distinct prefixes of the rows of ``unit``, which are sorted, not counting those of row ``after`` before them."""
    total = 0
    for r in unit:
        total += len(contexts[r]) - (0 if after is None else _common(contexts[after], contexts[r]))
        after = r
    return total


def _common(a: Tokens, b: Tokens) -> int:
    shortest = min(len(a), len(b))
    differs = np.flatnonzero(a[:shortest] != b[:shortest])
    return int(differs[0]) if len(differs) else shortest


def _pack(
    rows: Sequence[Row], contexts: Sequence[Tokens], weights_R: NDArray[np.float64], version: int, *, teachers: bool
) -> Pack:
    where = [np.flatnonzero(row.loss_mask) for row in rows]
    counts = [len(at) for at in where]
    pairs = list(zip(rows, where, strict=True))
    experts = provenance.experts_of(rows, contexts)
    return Pack(
        contexts=tuple(contexts),
        row_K=np.repeat(np.arange(len(rows)), counts),
        at_K=np.concatenate(where) - 1,
        targets_K=np.concatenate([row.tokens[at] for row, at in pairs]).astype(np.int64),
        behaviour_K=np.concatenate([row.logprobs[at] for row, at in pairs]),
        advantages_K=np.concatenate([row.advantages[at] for row, at in pairs]),
        weights_K=np.repeat(weights_R, counts),
        lags_K=np.concatenate([version - row.versions[at] for row, at in pairs]),
        mixed_K=np.concatenate(
            [np.zeros(len(at), np.bool_) if row.mixed is None else row.mixed[at] for row, at in pairs]
        ),
        teachers_R=tuple(take_positions(row.teachers, at) for row, at in pairs) if teachers else (),
        support=provenance.support_of(rows, where),
        experts=experts,
        symbols=None if experts is None else tuple(provenance.routed_symbols(contexts, experts)),
    )
