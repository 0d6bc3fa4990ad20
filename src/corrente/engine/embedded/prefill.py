"""Compute many contexts at once, folded into one prefix tree, so that shared prefixes are computed once.

A prefix may be shared by the members of a group, by different prompts, or with a live sequence. Keys and values that a live
sequence has under the present weights are copied (``CachedPrefix``) instead of being computed again. The last token of a context
is always computed, since its logits are wanted. Nodes go through the model in pre-order, one chunk at a time, which bounds the
size of the attention mask and of the logits.

Shapes: S sequences, N nodes of their tree, Q nodes of a chunk, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from corrente.data.prefix_tree import PrefixTree, fold_into_prefix_tree
from corrente.data.routing import Experts, unknown_experts
from corrente.data.types import Scores, Tokens
from corrente.engine.embedded.kv import KVCache, PrefillKV
from corrente.engine.embedded.model import ModelRunner

CHUNK = 1024
"""Nodes per forward pass of a prefill."""
SCORE_CHUNK = 256
"""Tokens per forward pass of ``score_tokens``, which needs the logits of every token."""

Index = NDArray[np.int64]


class CachedPrefix(msgspec.Struct, frozen=True):
    """The first tokens of a live row, whose keys and values the present weights computed, through ``experts``."""

    row: int
    tokens: Tokens
    experts: Experts | None = None


class PrefillResult(msgspec.Struct, frozen=True, eq=False):
    """The result of a prefill.

    ``logits_SV``: the logits after each sequence, when asked for. ``computed``: the number of tokens that went through the model.
    ``experts``: those of all tokens of each sequence, copied ones included, where the model records any.
    """

    logits_SV: torch.Tensor | None
    computed: int
    experts: tuple[Experts, ...] | None = None


def prefill_rows(
    model: ModelRunner,
    cache: KVCache,
    contexts: Sequence[Tokens],
    *,
    first_row: int,
    cached_prefixes: Sequence[CachedPrefix],
    logits: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> PrefillResult:
    """Fill rows [first_row, first_row + S) of the cache with the keys and values of the contexts.

    With ``logits`` the result has the logits after each context. ``cached_prefixes``: live rows to copy from.
    """
    tree = fold_into_prefix_tree(contexts)
    last_S = np.array([path[-1] for path in tree.paths], np.int64)
    known, rows, slots = _find_cached_nodes(tree, contexts, cached_prefixes)
    if logits:
        computed_anyway = np.isin(known, last_S)
        known, rows, slots = known[~computed_anyway], rows[~computed_anyway], slots[~computed_anyway]
    nodes = PrefillKV(
        cache,
        len(tree),
        known=torch.from_numpy(known).to(device),
        rows=torch.from_numpy(rows).to(device),
        slots=torch.from_numpy(slots).to(device),
    )
    unknown = np.setdiff1d(np.arange(len(tree)), known)
    wanted = np.unique(last_S) if logits else np.empty(0, np.int64)
    routed = _allocate_experts(model, tree, known, rows, cached_prefixes)
    passes = _forward_in_chunks(
        model, tree, nodes, unknown, wanted, chunk=CHUNK, dtype=dtype, device=device, routed=routed
    )
    parts = [part for _, part in passes]
    cache.store_paths(first_row, nodes, torch.from_numpy(_pad_paths(tree.paths)).to(device))
    logits_SV = None
    if logits:
        place = torch.from_numpy(np.searchsorted(wanted, last_S)).to(device)
        logits_SV = torch.cat(parts).index_select(0, place)
    experts = None if routed is None else tuple(routed[path] for path in tree.paths)
    return PrefillResult(logits_SV, len(unknown), experts)


def _allocate_experts(
    model: ModelRunner, tree: PrefixTree, known: Index, rows: Index, cached_prefixes: Sequence[CachedPrefix]
) -> Experts | None:
    """Allocate the experts of every node (N, layers, choices), and copy those of the nodes whose keys are copied."""
    shape = model.routing_shape()
    if shape is None:
        return None
    routed = unknown_experts(len(tree), shape)
    for donor in cached_prefixes:
        mine = known[rows == donor.row]
        if len(mine):
            assert donor.experts is not None
            routed[mine] = donor.experts[tree.positions[mine]]
    return routed


def score_tokens(
    model: ModelRunner, tokens: Tokens, *, top: int, temperature: float = 1.0, dtype: torch.dtype, device: torch.device
) -> Scores:
    """Log-probs of tokens[1:] at ``temperature``, and the ``top`` likeliest tokens at each place.

    It uses a cache of its own, and logits exist for one chunk at a time.
    """
    tree = fold_into_prefix_tree([tokens])
    none = torch.empty(0, dtype=torch.long, device=device)
    nodes = PrefillKV(KVCache(max_rows=1, max_slots=1), len(tree), known=none, rows=none, slots=none)
    count = max(len(tokens) - 1, 0)
    every = np.arange(count)
    target = torch.from_numpy(tokens[1:].astype(np.int64)).to(device)
    logprobs, top_ids = np.empty(count, np.float32), np.empty((count, top), np.int32)
    top_logprobs = np.empty((count, top), np.float32)
    for at, logits in _forward_in_chunks(
        model, tree, nodes, every, every, chunk=SCORE_CHUNK, dtype=dtype, device=device
    ):
        wide = logits.float() / temperature
        total = torch.logsumexp(wide, -1, keepdim=True)
        logprobs[at] = (wide.gather(1, target[torch.from_numpy(at).to(device)][:, None]) - total)[:, 0].cpu().numpy()
        if top:
            values, ids = wide.topk(top, -1)
            top_ids[at], top_logprobs[at] = ids.cpu().numpy(), (values - total).cpu().numpy()
    return Scores(logprobs=logprobs, top_ids=top_ids, top_logprobs=top_logprobs)


def _forward_in_chunks(
    model: ModelRunner,
    tree: PrefixTree,
    nodes: PrefillKV,
    todo: Index,
    wanted: Index,
    *,
    chunk: int,
    dtype: torch.dtype,
    device: torch.device,
    routed: Experts | None = None,
) -> Iterator[tuple[Index, torch.Tensor]]:
    """Run the nodes ``todo`` through the model, and yield (nodes, logits) of the wanted ones of each chunk.

    ``routed`` (N, layers, choices), if given, receives their experts.
    """
    for start in range(0, len(todo), chunk):
        at_Q = todo[start : start + chunk]
        visible = int(at_Q[-1]) + 1
        nodes.set_chunk(torch.from_numpy(at_Q).to(device), visible)
        j = np.arange(visible)
        allowed = torch.from_numpy((j <= at_Q[:, None]) & (at_Q[:, None] < tree.end[j])).to(device)
        mask = torch.zeros(allowed.shape, dtype=dtype, device=device).masked_fill_(~allowed, -torch.inf)
        keep = np.flatnonzero(np.isin(at_Q, wanted))
        logits = model.forward(
            torch.from_numpy(tree.tokens[at_Q].astype(np.int64)).to(device)[None],
            torch.from_numpy(tree.positions[at_Q]).to(device)[None],
            mask[None, None],
            nodes,
            # One token is kept even where none is wanted, so that the model's head never multiplies an empty matrix.
            torch.from_numpy(keep if len(keep) else np.zeros(1, np.int64)).to(device),
        )
        if routed is not None:
            routed[at_Q] = model.recorded_experts()
        if len(keep):
            yield at_Q[keep], logits


def _find_cached_nodes(
    tree: PrefixTree, contexts: Sequence[Tokens], cached_prefixes: Sequence[CachedPrefix]
) -> tuple[Index, Index, Index]:
    """The nodes that a live row holds, in order, with its row and the slot there."""
    row = np.full(len(tree), -1, np.int64)
    seen: set[bytes] = set()
    for context, path in zip(contexts, tree.paths, strict=True):
        key = context.tobytes()
        if key in seen:
            continue
        seen.add(key)
        best, shared = -1, 0
        for donor in cached_prefixes:
            common = _common_prefix_length(context, donor.tokens)
            if common > shared:
                best, shared = donor.row, common
        fresh = path[:shared][row[path[:shared]] < 0]
        row[fresh] = best
    known = np.flatnonzero(row >= 0)
    return known, row[known], tree.positions[known]


def _common_prefix_length(a: Tokens, b: Tokens) -> int:
    shortest = min(len(a), len(b))
    differs = np.flatnonzero(a[:shortest] != b[:shortest])
    return int(differs[0]) if len(differs) else shortest


def _pad_paths(paths: Sequence[Index]) -> Index:
    out = np.zeros((len(paths), max(len(path) for path in paths)), np.int64)
    for at, path in enumerate(paths):
        out[at, : len(path)] = path
    return out
