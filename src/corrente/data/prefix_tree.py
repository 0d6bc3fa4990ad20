"""A prefix tree of sequences, so that every distinct (prefix, token) pair is computed once.

A causal model gives a token the same hidden state in every sequence that has the same tokens before it. Folding a batch into
a prefix tree therefore changes no number and removes all repeated work: the prompt shared by the G completions of a group,
the few-shot or system prefix shared by all prompts, and completions with equal beginnings.

Nodes are numbered in depth-first pre-order, so the subtree of node j is the interval [j, end[j]) and

    node i attends to node j   iff   j <= i < end[j]                                  (ancestor or self)

which is a mask any attention backend can take (dense for SDPA, a two-comparison predicate for FlexAttention).
The engine uses it for prefill and the learner for training. numpy only.

Shapes: N nodes, S sequences.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from corrente.data.types import Mask, Tokens

Index = NDArray[np.int64]


class PrefixTree(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """N nodes in depth-first pre-order, over S sequences.

    ``tokens`` (N,): the token of each node. ``positions`` (N,): its depth, which is its position id. ``parent`` (N,): -1 at a
    root. ``end`` (N,): one past the last node of its subtree. ``paths``: for each sequence, the nodes of its tokens.
    """

    tokens: Tokens
    positions: Index
    parent: Index
    end: Index
    paths: tuple[Index, ...]

    def __len__(self) -> int:
        return len(self.tokens)

    def attention_mask(self) -> Mask:
        """Attention mask (N, N): [i, j] is True where node i may attend to node j."""
        i = np.arange(len(self))[:, None]
        j = np.arange(len(self))[None, :]
        return (j <= i) & (i < self.end[None, :])


def fold_into_prefix_tree(sequences: Sequence[Tokens]) -> PrefixTree:
    """Fold sequences into their prefix tree. Equal sequences share a path; an empty sequence has an empty path."""
    # In sorted order every sequence shares its longest prefix with its predecessor, so one pass over the tokens is enough.
    order = sorted(range(len(sequences)), key=lambda s: sequences[s].tolist())
    tokens: list[int] = []
    positions: list[int] = []
    parent: list[int] = []
    paths: list[Index] = [np.empty(0, np.int64)] * len(sequences)
    before: Tokens = np.empty(0, np.int32)
    path_before: Index = np.empty(0, np.int64)
    for s in order:
        now = np.asarray(sequences[s], np.int32)
        shared = _common_prefix(before, now)
        path = np.empty(len(now), np.int64)
        path[:shared] = path_before[:shared]
        first = len(tokens)
        path[shared:] = np.arange(first, first + len(now) - shared)
        for at in range(shared, len(now)):
            tokens.append(int(now[at]))
            positions.append(at)
            parent.append(int(path[at - 1]) if at else -1)
        paths[s] = path
        before, path_before = now, path
    return PrefixTree(
        tokens=np.array(tokens, np.int32),
        positions=np.array(positions, np.int64),
        parent=np.array(parent, np.int64),
        end=_subtree_ends(parent),
        paths=tuple(paths),
    )


def _common_prefix(a: Tokens, b: Tokens) -> int:
    shortest = min(len(a), len(b))
    differs = np.flatnonzero(a[:shortest] != b[:shortest])
    return int(differs[0]) if len(differs) else shortest


def _subtree_ends(parent: Sequence[int]) -> Index:
    end = np.arange(1, len(parent) + 1, dtype=np.int64)
    for node in range(len(parent) - 1, -1, -1):
        if parent[node] >= 0:
            end[parent[node]] = max(end[parent[node]], end[node])
    return end
