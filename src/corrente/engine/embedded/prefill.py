"""Computing many contexts at once: they are folded into one prefix tree, so that a prefix shared by the members of a group, by
different prompts, or with a sequence that is live already, is computed once.

What a live sequence has computed under the present weights is copied instead of computed again ("donors"). The last token of a
context is always computed, since its logits are wanted. Nodes go through the model in pre-order, a chunk at a time, which bounds
the attention mask and the logits.

Shapes: S sequences, N nodes of their tree, Q nodes of a chunk, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from corrente.data.prefix_tree import Tree, fold
from corrente.data.routing import Experts, nowhere
from corrente.data.types import Scores, Tokens
from corrente.engine.embedded.kv import KVCache, Nodes
from corrente.engine.embedded.model import ModelPath

CHUNK = 1024
SCORE_CHUNK = 256

Index = NDArray[np.int64]


class Donor(msgspec.Struct, frozen=True):
    """A live row whose first tokens' keys and values were all computed by the present weights, through ``experts``."""

    row: int
    tokens: Tokens
    experts: Experts | None = None


class Filled(msgspec.Struct, frozen=True, eq=False):
    """What a prefill computed: logits after each sequence (S, V) when asked for, how many tokens went through the model, and the
    experts of all tokens of each sequence, known ones included, where the model records any."""

    logits_SV: torch.Tensor | None
    computed: int
    experts: tuple[Experts, ...] | None = None


def fill(
    model: ModelPath,
    cache: KVCache,
    contexts: Sequence[Tokens],
    *,
    first_row: int,
    donors: Sequence[Donor],
    logits: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> Filled:
    """Fill rows [first_row, first_row + S) of the cache with the contexts' keys and values."""
    tree = fold(contexts)
    last_S = np.array([path[-1] for path in tree.paths], np.int64)
    known, rows, slots = _known(tree, contexts, donors)
    if logits:
        computed_anyway = np.isin(known, last_S)
        known, rows, slots = known[~computed_anyway], rows[~computed_anyway], slots[~computed_anyway]
    nodes = Nodes(
        cache,
        len(tree),
        known=torch.from_numpy(known).to(device),
        rows=torch.from_numpy(rows).to(device),
        slots=torch.from_numpy(slots).to(device),
    )
    unknown = np.setdiff1d(np.arange(len(tree)), known)
    wanted = np.unique(last_S) if logits else np.empty(0, np.int64)
    routed = _routed(model, tree, known, rows, donors)
    passes = _passes(model, tree, nodes, unknown, wanted, chunk=CHUNK, dtype=dtype, device=device, routed=routed)
    parts = [part for _, part in passes]
    cache.store(first_row, nodes, torch.from_numpy(_padded(tree.paths)).to(device))
    logits_SV = None
    if logits:
        place = torch.from_numpy(np.searchsorted(wanted, last_S)).to(device)
        logits_SV = torch.cat(parts).index_select(0, place)
    experts = None if routed is None else tuple(routed[path] for path in tree.paths)
    return Filled(logits_SV, len(unknown), experts)


def _routed(model: ModelPath, tree: Tree, known: Index, rows: Index, donors: Sequence[Donor]) -> Experts | None:
    """Room for the experts of every node, with those of known nodes from the rows that give their keys and values."""
    shape = model.routing()
    if shape is None:
        return None
    routed = nowhere(len(tree), shape)
    for donor in donors:
        mine = known[rows == donor.row]
        if len(mine):
            assert donor.experts is not None
            routed[mine] = donor.experts[tree.positions[mine]]
    return routed


def score(
    model: ModelPath, tokens: Tokens, *, top: int, temperature: float = 1.0, dtype: torch.dtype, device: torch.device
) -> Scores:
    """Log-probs of tokens[1:] at ``temperature``, and the ``top`` likeliest at each place, in a cache of its own. Logits exist
    for one chunk at a time."""
    tree = fold([tokens])
    none = torch.empty(0, dtype=torch.long, device=device)
    nodes = Nodes(KVCache(max_rows=1, max_slots=1), len(tree), known=none, rows=none, slots=none)
    count = max(len(tokens) - 1, 0)
    every = np.arange(count)
    target = torch.from_numpy(tokens[1:].astype(np.int64)).to(device)
    logprobs, top_ids = np.empty(count, np.float32), np.empty((count, top), np.int32)
    top_logprobs = np.empty((count, top), np.float32)
    for at, logits in _passes(model, tree, nodes, every, every, chunk=SCORE_CHUNK, dtype=dtype, device=device):
        wide = logits.float() / temperature
        total = torch.logsumexp(wide, -1, keepdim=True)
        logprobs[at] = (wide.gather(1, target[torch.from_numpy(at).to(device)][:, None]) - total)[:, 0].cpu().numpy()
        if top:
            values, ids = wide.topk(top, -1)
            top_ids[at], top_logprobs[at] = ids.cpu().numpy(), (values - total).cpu().numpy()
    return Scores(logprobs=logprobs, top_ids=top_ids, top_logprobs=top_logprobs)


def _passes(
    model: ModelPath,
    tree: Tree,
    nodes: Nodes,
    todo: Index,
    wanted: Index,
    *,
    chunk: int,
    dtype: torch.dtype,
    device: torch.device,
    routed: Experts | None = None,
) -> Iterator[tuple[Index, torch.Tensor]]:
    """Run the nodes ``todo`` through the model; yield (nodes, their logits) for those that are wanted. ``routed`` takes their
    experts."""
    for start in range(0, len(todo), chunk):
        at_Q = todo[start : start + chunk]
        visible = int(at_Q[-1]) + 1
        nodes.expect(torch.from_numpy(at_Q).to(device), visible)
        j = np.arange(visible)
        allowed = torch.from_numpy((j <= at_Q[:, None]) & (at_Q[:, None] < tree.end[j])).to(device)
        mask = torch.zeros(allowed.shape, dtype=dtype, device=device).masked_fill_(~allowed, -torch.inf)
        keep = np.flatnonzero(np.isin(at_Q, wanted))
        logits = model.forward(
            torch.from_numpy(tree.tokens[at_Q].astype(np.int64)).to(device)[None],
            torch.from_numpy(tree.positions[at_Q]).to(device)[None],
            mask[None, None],
            nodes,
            torch.from_numpy(keep if len(keep) else np.zeros(1, np.int64)).to(device),
        )
        if routed is not None:
            routed[at_Q] = model.routed()
        if len(keep):
            yield at_Q[keep], logits


def _known(tree: Tree, contexts: Sequence[Tokens], donors: Sequence[Donor]) -> tuple[Index, Index, Index]:
    """Nodes that some donor holds, in order, with its row and the slot there."""
    row = np.full(len(tree), -1, np.int64)
    seen: set[bytes] = set()
    for context, path in zip(contexts, tree.paths, strict=True):
        key = context.tobytes()
        if key in seen:
            continue
        seen.add(key)
        best, shared = -1, 0
        for donor in donors:
            common = _common(context, donor.tokens)
            if common > shared:
                best, shared = donor.row, common
        fresh = path[:shared][row[path[:shared]] < 0]
        row[fresh] = best
    known = np.flatnonzero(row >= 0)
    return known, row[known], tree.positions[known]


def _common(a: Tokens, b: Tokens) -> int:
    shortest = min(len(a), len(b))
    differs = np.flatnonzero(a[:shortest] != b[:shortest])
    return int(differs[0]) if len(differs) else shortest


def _padded(paths: Sequence[Index]) -> Index:
    out = np.zeros((len(paths), max(len(path) for path in paths)), np.int64)
    for at, path in enumerate(paths):
        out[at, : len(path)] = path
    return out
