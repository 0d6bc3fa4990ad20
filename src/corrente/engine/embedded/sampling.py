"""Drawing tokens: temperature, top-k, top-p, min-p, and the log-probability of what was drawn.

Every row has a seed of its own, and the uniform number behind its token is a hash of (seed, position in the sequence): a draw
does not depend on what else is in the batch, and a sequence that was interrupted draws as if it had not been. Tokens come
from the inverse of the cumulative distribution, found in two levels (which block of the vocabulary, which token in it), so
that one uniform number and no sort is all a row needs. Rows with top-k or top-p look at their largest logits only, where
these turn out to suffice. Rows that ask for it also say which ids they drew from.

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from corrente.data.support import Ids
from corrente.data.types import Floats, Sampling, Tokens

BLOCK = 256
FIRST_CANDIDATES = 128
BINS, REACH = 512, 24.0
"""Of the histogram by logit: bins, and how far below the largest logit the last of them begins."""


class SamplingRules(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Sampling parameters of a batch, row by row, and which rows are drawn how."""

    seeds: NDArray[np.uint64]
    greedy: torch.Tensor
    dense: torch.Tensor
    cut: torch.Tensor
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    plain: bool
    """All rows are dense, at temperature 1 and without min-p."""
    keeps: tuple[bool, ...]
    """Which rows say what they drew from: those that cut something off and are asked to."""


def compile_rules(rows: Sequence[tuple[Sampling, int]], *, vocabulary: int, device: torch.device) -> SamplingRules:
    """Rules for rows of (sampling, seed). ``top_k`` of 0 becomes the whole vocabulary."""
    samplings = [sampling for sampling, _ in rows]
    greedy = [i for i, s in enumerate(samplings) if s.temperature == 0]
    cut = [i for i, s in enumerate(samplings) if s.temperature > 0 and (0 < s.top_k < vocabulary or s.top_p < 1)]
    dense = sorted(set(range(len(rows))) - set(greedy) - set(cut))

    def column(values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device)[:, None]

    def index(values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.long, device=device)

    return SamplingRules(
        seeds=np.array([seed & 0xFFFFFFFFFFFFFFFF for _, seed in rows], np.uint64),
        greedy=index(greedy),
        dense=index(dense),
        cut=index(cut),
        temperature=column([s.temperature for s in samplings]),
        top_k=column([min(s.top_k, vocabulary) or vocabulary for s in samplings]).long(),
        top_p=column([s.top_p for s in samplings]),
        min_p=column([s.min_p for s in samplings]),
        plain=len(dense) == len(rows) and all(s.temperature == 1 and s.min_p == 0 for s in samplings),
        keeps=tuple(s.keep_support and s.cuts for s in samplings),
    )


class Draws(NamedTuple):
    """One token per row, its log-probability in the distribution it was drawn from (greedy: the untempered one), and the ids
    that were kept for the draw, where a row says so."""

    tokens: Tokens
    logprobs: Floats
    kept: list[Ids | None]


def draw(logits_BV: torch.Tensor, rules: SamplingRules, positions_B: NDArray[np.int64]) -> Draws:
    """One token per row. May overwrite the logits. Row by row in memory, whatever the model's layout: reductions of blocks over
    strided columns take torch several times as long as the copy."""
    logits_BV = logits_BV.float().contiguous()
    count = len(logits_BV)
    tokens = torch.empty(count, dtype=torch.long, device=logits_BV.device)
    logprobs = torch.empty(count, dtype=torch.float32, device=logits_BV.device)
    kept: list[Ids | None] = [None] * count
    uniform = torch.from_numpy(uniforms(rules.seeds, positions_B)).to(logits_BV.device)
    if rules.plain:
        tokens, logprobs, _ = _dense(logits_BV.sub_(logits_BV.amax(-1, keepdim=True)), None, uniform)
    else:
        for rows, way in ((rules.greedy, _greedy), (rules.dense, _tempered), (rules.cut, _truncated)):
            if len(rows):
                picked = logits_BV if len(rows) == count else logits_BV.index_select(0, rows)
                tokens[rows], logprobs[rows], sets = way(picked, rules, rows, uniform[rows])
                for row, ids in zip(rows.tolist(), sets or (), strict=sets is not None):
                    kept[row] = ids if rules.keeps[row] else None
    return Draws(tokens.cpu().numpy().astype(np.int32), logprobs.cpu().numpy(), kept)


def uniforms(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """Uniform numbers in [0, 1), one per (seed, position): two rounds of the splitmix64 finaliser (Steele et al. 2014)."""
    mixed = _mix(seeds + np.uint64(0x9E3779B97F4A7C15))
    mixed = _mix(mixed ^ (positions.astype(np.uint64) * np.uint64(0xD1342543DE82EF95)))
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


class Drawn(NamedTuple):
    """Of some rows: tokens, log-probs, and the kept ids of each, None where nobody asks."""

    tokens: torch.Tensor
    logprobs: torch.Tensor
    kept: list[Ids] | None = None


def _asked(rules: SamplingRules, rows: torch.Tensor) -> bool:
    return any(rules.keeps) and any(rules.keeps[row] for row in rows.tolist())


def _kept(weights: torch.Tensor, ids: torch.Tensor | None = None) -> list[Ids]:
    """Per row, the ids of the columns that have weight; ``ids`` (B, C) names the columns, which else are the ids."""
    row, column = (weights > 0).nonzero(as_tuple=True)
    names = (column if ids is None else ids[row, column]).cpu().numpy().astype(np.int32)
    counts = torch.bincount(row, minlength=len(weights)).cpu().numpy()
    return np.split(names, np.cumsum(counts)[:-1])


def _greedy(logits: torch.Tensor, _rules: SamplingRules, _rows: torch.Tensor, _uniform: torch.Tensor) -> Drawn:
    best = logits.argmax(-1)
    return Drawn(best, logits.gather(-1, best[:, None])[:, 0] - torch.logsumexp(logits, -1))


def _tempered(logits: torch.Tensor, rules: SamplingRules, rows: torch.Tensor, uniform: torch.Tensor) -> Drawn:
    scaled = logits / rules.temperature[rows]
    min_p = rules.min_p[rows]
    least = min_p if bool((min_p > 0).any()) else None
    return _dense(scaled.sub_(scaled.amax(-1, keepdim=True)), least, uniform, keep=_asked(rules, rows))


def _dense(shifted: torch.Tensor, min_p: torch.Tensor | None, uniform: torch.Tensor, *, keep: bool = False) -> Drawn:
    """Draw from exp(shifted), whose largest element is 1; overwrites ``shifted``."""
    weights = shifted.exp_()
    if min_p is not None:
        weights.masked_fill_(weights < min_p, 0)
    return _inverse(weights, uniform, keep=keep)


def _inverse(weights: torch.Tensor, uniform: torch.Tensor, *, keep: bool) -> Drawn:
    """Invert the cumulative distribution of ``weights`` (B, V) at ``uniform`` (B,). Cumulative sums are float64."""
    vocabulary = weights.shape[1]
    whole = vocabulary // BLOCK * BLOCK
    sums = weights[:, :whole].unflatten(1, (-1, BLOCK)).sum(-1)
    if whole < vocabulary:
        sums = torch.cat([sums, weights[:, whole:].sum(-1, keepdim=True)], -1)
    cumulative = sums.double().cumsum(-1)
    total = cumulative[:, -1:]
    target = uniform[:, None] * total
    block = torch.searchsorted(cumulative, target, right=True).clamp_(max=cumulative.shape[1] - 1)
    before = torch.where(block > 0, cumulative.gather(1, (block - 1).clamp_(min=0)), 0.0)
    columns = block * BLOCK + torch.arange(BLOCK, device=block.device)
    inside = weights.gather(1, columns.clamp(max=vocabulary - 1)) * (columns < vocabulary)
    place = _invert(inside, target - before)
    token = columns.gather(1, place)[:, 0]
    logprob = inside.gather(1, place).log()[:, 0] - total[:, 0].log()
    return Drawn(token, logprob.float(), _kept(weights) if keep else None)


def _truncated(logits: torch.Tensor, rules: SamplingRules, rows: torch.Tensor, uniform: torch.Tensor) -> Drawn:
    """Draw among the largest logits, in the order of their ids: which of two near-equal ones is larger then decides nothing.
    Rows whose top-p reaches beyond the first candidates look at the whole vocabulary."""
    scaled = logits / rules.temperature[rows]
    top_k, top_p, min_p = rules.top_k[rows], rules.top_p[rows], rules.min_p[rows]
    vocabulary = scaled.shape[1]
    first, limited = min(FIRST_CANDIDATES, vocabulary), top_k < vocabulary
    values, ids = scaled.topk(min(vocabulary, max(first, int(torch.where(limited, top_k, 0).max()))), -1)
    inside_k = torch.arange(values.shape[1], device=values.device) < top_k
    total = torch.logsumexp(values.masked_fill(~inside_k, -torch.inf), -1, keepdim=True)
    if not bool(limited.all()):
        total = torch.where(limited, total, torch.logsumexp(scaled, -1, keepdim=True))
    weights = (values - total).exp().masked_fill(~inside_k, 0)
    cumulative = weights.double().cumsum(-1)
    outside = (cumulative - weights) >= top_p
    outside[:, 0] = False
    weights = weights.masked_fill(outside | (weights < min_p * weights[:, :1]), 0)
    ids, order = ids.sort(-1)
    weights = weights.gather(1, order)
    place = _invert(weights, uniform[:, None] * weights.double().sum(-1, keepdim=True))
    logprob = (weights.gather(1, place).log() - weights.sum(-1, keepdim=True).log())[:, 0]
    token = ids.gather(1, place)[:, 0]
    keep = _asked(rules, rows)
    kept = _kept(weights, ids) if keep else None
    wide = (~limited & (cumulative[:, first - 1 : first] < top_p))[:, 0].nonzero()[:, 0]
    if len(wide):
        token[wide], logprob[wide], sets = _nucleus(scaled[wide], top_p[wide], min_p[wide], uniform[wide], keep=keep)
        for row, ids_of_row in zip(wide.tolist(), sets or (), strict=sets is not None):
            assert kept is not None
            kept[row] = ids_of_row
    return Drawn(token, logprob, kept)


def _nucleus(
    scaled: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor, uniform: torch.Tensor, *, keep: bool
) -> Drawn:
    """Top-p, then min-p, over the whole vocabulary without sorting it: a histogram of the probability mass by logit finds the
    bin in which top_p is reached, and only that bin is sorted."""
    shifted = scaled - scaled.amax(-1, keepdim=True)
    bins = (shifted * (-BINS / REACH)).clamp_(max=BINS - 1).long()
    weights = shifted.exp()
    mass = torch.zeros(len(weights), BINS, device=weights.device).scatter_add_(1, bins, weights).double()
    cumulative = mass.cumsum(-1)
    target = top_p * cumulative[:, -1:]
    edge = (cumulative < target).sum(-1, keepdim=True)
    before = (cumulative - mass).gather(1, edge)
    weights.masked_fill_(bins > edge, 0)
    for row in range(len(weights)):
        within = (bins[row] == edge[row]).nonzero()[:, 0]
        within = within[shifted[row, within].argsort(descending=True, stable=True)]
        held = weights[row, within].double()
        weights[row, within[before[row] + held.cumsum(0) - held >= target[row]]] = 0
    return _inverse(weights.masked_fill_(weights < min_p, 0), uniform, keep=keep)


def _invert(weights: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """First place whose cumulative weight exceeds ``target`` (B, 1); never one of weight 0 while any is positive."""
    cumulative = weights.double().cumsum(-1)
    below = torch.minimum(target, cumulative[:, -1:] * (1 - 1e-12))
    return torch.searchsorted(cumulative, below, right=True).clamp_(max=weights.shape[1] - 1)
