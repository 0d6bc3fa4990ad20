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

from corrente.engine.embedded.kv import KVCache, Nodes
from corrente.engine.embedded.model import ModelPath
from corrente.tree import Tree, fold
from corrente.types import Floats, Tokens

CHUNK = 1024
SCORE_CHUNK = 256

Index = NDArray[np.int64]


class Donor(msgspec.Struct, frozen=True):
    """A live row whose first tokens' keys and values were all computed by the present weights."""

    row: int
    tokens: Tokens


class Filled(msgspec.Struct, frozen=True, eq=False):
    """What a prefill computed: logits after each sequence (S, V) when asked for, and how many tokens went through the model."""

    logits_SV: torch.Tensor | None
    computed: int


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
    parts = [part for _, part in _passes(model, tree, nodes, unknown, wanted, chunk=CHUNK, dtype=dtype, device=device)]
    cache.store(first_row, nodes, torch.from_numpy(_padded(tree.paths)).to(device))
    logits_SV = None
    if logits:
        place = torch.from_numpy(np.searchsorted(wanted, last_S)).to(device)
        logits_SV = torch.cat(parts).index_select(0, place)
    return Filled(logits_SV, len(unknown))


def score(model: ModelPath, tokens: Tokens, *, dtype: torch.dtype, device: torch.device) -> Floats:
    """Log-prob of tokens[1:] at temperature 1, (T-1,), in a cache of its own."""
    tree = fold([tokens])
    none = torch.empty(0, dtype=torch.long, device=device)
    nodes = Nodes(KVCache(max_rows=1, max_slots=1), len(tree), known=none, rows=none, slots=none)
    every = np.arange(len(tokens) - 1)
    target = torch.from_numpy(tokens[1:].astype(np.int64)).to(device)
    out = []
    for at, logits in _passes(model, tree, nodes, every, every, chunk=SCORE_CHUNK, dtype=dtype, device=device):
        wide = logits.float()
        picked = wide.gather(1, target[torch.from_numpy(at).to(device)][:, None])[:, 0]
        out.append((picked - torch.logsumexp(wide, -1)).cpu().numpy())
    return np.concatenate(out) if out else np.empty(0, np.float32)


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
) -> Iterator[tuple[Index, torch.Tensor]]:
    """Run the nodes ``todo`` through the model; yield (nodes, their logits) for those that are wanted."""
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
