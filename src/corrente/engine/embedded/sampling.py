"""Draw tokens with temperature, top-k, top-p and min-p, and compute the log-probability of each draw.

Every row has its own seed, and the uniform number behind its token is a hash of (seed, position in the sequence). So a draw does
not depend on the rest of the batch, and a resumed sequence draws as if it had not been interrupted. Tokens come from the inverse
of the cumulative distribution, found in two levels (the block of the vocabulary, then the token in it), so a row needs one
uniform number and no sort. Rows with top-k or top-p look at their largest logits only, where these suffice. Rows that keep their
support also return the ids they drew from.

Shapes: B rows, V vocabulary, C candidates.
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
TOP_CANDIDATES = 128
BINS, REACH = 512, 24.0
"""The histogram by logit: the number of bins, and the distance of the last bin from the largest logit."""


class SamplingRules(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Sampling parameters of a batch, row by row, and the rows of each kind.

    ``greedy``, ``dense`` and ``truncated`` are row indices; ``temperature``, ``top_k``, ``top_p`` and ``min_p`` are (B, 1).
    """

    seeds: NDArray[np.uint64]
    greedy: torch.Tensor
    dense: torch.Tensor
    truncated: torch.Tensor
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    plain: bool
    """True when all rows are dense, at temperature 1 and without min-p."""
    keeps_support: tuple[bool, ...]
    """For each row, True when it returns the ids it drew from: it cuts some off and was asked to keep them."""


def compile_rules(rows: Sequence[tuple[Sampling, int]], *, vocabulary: int, device: torch.device) -> SamplingRules:
    """Build the rules for rows of (sampling, seed); a ``top_k`` of 0 becomes the whole vocabulary."""
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
        truncated=index(cut),
        temperature=column([s.temperature for s in samplings]),
        top_k=column([min(s.top_k, vocabulary) or vocabulary for s in samplings]).long(),
        top_p=column([s.top_p for s in samplings]),
        min_p=column([s.min_p for s in samplings]),
        plain=len(dense) == len(rows) and all(s.temperature == 1 and s.min_p == 0 for s in samplings),
        keeps_support=tuple(s.keep_support and s.truncates for s in samplings),
    )


class Draws(NamedTuple):
    """The drawn token of each row (B,), its log-prob (B,), and the ids kept for the draw where the row keeps its support.

    The log-prob is that of the distribution drawn from; for greedy rows that of the distribution at temperature 1.
    """

    tokens: Tokens
    logprobs: Floats
    kept_ids: list[Ids | None]


def draw_tokens(logits_BV: torch.Tensor, rules: SamplingRules, positions_B: NDArray[np.int64]) -> Draws:
    """Draw one token per row from logits (B, V), which may be overwritten; ``positions_B``: the position of each token."""
    # Contiguous rows, whatever the model's layout: block sums over strided columns take torch several times the copy's time.
    logits_BV = logits_BV.float().contiguous()
    count = len(logits_BV)
    tokens = torch.empty(count, dtype=torch.long, device=logits_BV.device)
    logprobs = torch.empty(count, dtype=torch.float32, device=logits_BV.device)
    kept: list[Ids | None] = [None] * count
    uniform = torch.from_numpy(uniform_numbers(rules.seeds, positions_B)).to(logits_BV.device)
    if rules.plain:
        tokens, logprobs, _ = _draw_dense(logits_BV.sub_(logits_BV.amax(-1, keepdim=True)), None, uniform)
    else:
        for rows, way in (
            (rules.greedy, _draw_greedy),
            (rules.dense, _draw_tempered),
            (rules.truncated, _draw_truncated),
        ):
            if len(rows):
                picked = logits_BV if len(rows) == count else logits_BV.index_select(0, rows)
                tokens[rows], logprobs[rows], sets = way(picked, rules, rows, uniform[rows])
                for row, ids in zip(rows.tolist(), sets or (), strict=sets is not None):
                    kept[row] = ids if rules.keeps_support[row] else None
    return Draws(tokens.cpu().numpy().astype(np.int32), logprobs.cpu().numpy(), kept)


def uniform_numbers(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """Uniform numbers in [0, 1), one per (seed, position), by two rounds of the splitmix64 finaliser (Steele et al. 2014)."""
    mixed = _mix_bits(seeds + np.uint64(0x9E3779B97F4A7C15))
    mixed = _mix_bits(mixed ^ (positions.astype(np.uint64) * np.uint64(0xD1342543DE82EF95)))
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix_bits(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


class _RowDraws(NamedTuple):
    """Tokens and log-probs of some rows, and their kept ids; None where no row keeps its support."""

    tokens: torch.Tensor
    logprobs: torch.Tensor
    kept_ids: list[Ids] | None = None


def _any_keeps_support(rules: SamplingRules, rows: torch.Tensor) -> bool:
    return any(rules.keeps_support) and any(rules.keeps_support[row] for row in rows.tolist())


def _kept_ids_by_row(weights: torch.Tensor, ids: torch.Tensor | None = None) -> list[Ids]:
    """For each row the ids of the columns with positive weight; ``ids`` (B, C): the id of each column, else its index."""
    row, column = (weights > 0).nonzero(as_tuple=True)
    names = (column if ids is None else ids[row, column]).cpu().numpy().astype(np.int32)
    counts = torch.bincount(row, minlength=len(weights)).cpu().numpy()
    return np.split(names, np.cumsum(counts)[:-1])


def _draw_greedy(logits: torch.Tensor, _rules: SamplingRules, _rows: torch.Tensor, _uniform: torch.Tensor) -> _RowDraws:
    best = logits.argmax(-1)
    return _RowDraws(best, logits.gather(-1, best[:, None])[:, 0] - torch.logsumexp(logits, -1))


def _draw_tempered(logits: torch.Tensor, rules: SamplingRules, rows: torch.Tensor, uniform: torch.Tensor) -> _RowDraws:
    scaled = logits / rules.temperature[rows]
    min_p = rules.min_p[rows]
    least = min_p if bool((min_p > 0).any()) else None
    return _draw_dense(scaled.sub_(scaled.amax(-1, keepdim=True)), least, uniform, keep=_any_keeps_support(rules, rows))


def _draw_dense(
    shifted: torch.Tensor, min_p: torch.Tensor | None, uniform: torch.Tensor, *, keep: bool = False
) -> _RowDraws:
    """Draw from exp(shifted), whose largest element is 1 in every row; overwrites ``shifted``."""
    weights = shifted.exp_()
    if min_p is not None:
        weights.masked_fill_(weights < min_p, 0)
    return _draw_by_inverse_cdf(weights, uniform, keep=keep)


def _draw_by_inverse_cdf(weights: torch.Tensor, uniform: torch.Tensor, *, keep: bool) -> _RowDraws:
    """Invert the cumulative distribution of ``weights`` (B, V) at ``uniform`` (B,).

    Cumulative sums are float64, since float32 loses the small weights of a large vocabulary.
    """
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
    place = _first_exceeding(inside, target - before)
    token = columns.gather(1, place)[:, 0]
    logprob = inside.gather(1, place).log()[:, 0] - total[:, 0].log()
    return _RowDraws(token, logprob.float(), _kept_ids_by_row(weights) if keep else None)


def _draw_truncated(logits: torch.Tensor, rules: SamplingRules, rows: torch.Tensor, uniform: torch.Tensor) -> _RowDraws:
    """Draw among the largest logits; rows whose top-p reaches beyond the candidates look at the whole vocabulary."""
    scaled = logits / rules.temperature[rows]
    top_k, top_p, min_p = rules.top_k[rows], rules.top_p[rows], rules.min_p[rows]
    vocabulary = scaled.shape[1]
    first, limited = min(TOP_CANDIDATES, vocabulary), top_k < vocabulary
    values, ids = scaled.topk(min(vocabulary, max(first, int(torch.where(limited, top_k, 0).max()))), -1)
    inside_k = torch.arange(values.shape[1], device=values.device) < top_k
    total = torch.logsumexp(values.masked_fill(~inside_k, -torch.inf), -1, keepdim=True)
    if not bool(limited.all()):
        total = torch.where(limited, total, torch.logsumexp(scaled, -1, keepdim=True))
    weights = (values - total).exp().masked_fill(~inside_k, 0)
    cumulative = weights.double().cumsum(-1)
    outside = (cumulative - weights) >= top_p
    outside[:, 0] = False  # the likeliest token always stays
    weights = weights.masked_fill(outside | (weights < min_p * weights[:, :1]), 0)
    # Draw in the order of the ids: then rounding, which may swap two near-equal logits, does not change the token.
    ids, order = ids.sort(-1)
    weights = weights.gather(1, order)
    place = _first_exceeding(weights, uniform[:, None] * weights.double().sum(-1, keepdim=True))
    logprob = (weights.gather(1, place).log() - weights.sum(-1, keepdim=True).log())[:, 0]
    token = ids.gather(1, place)[:, 0]
    keep = _any_keeps_support(rules, rows)
    kept = _kept_ids_by_row(weights, ids) if keep else None
    wide = (~limited & (cumulative[:, first - 1 : first] < top_p))[:, 0].nonzero()[:, 0]
    if len(wide):
        token[wide], logprob[wide], sets = _draw_top_p(scaled[wide], top_p[wide], min_p[wide], uniform[wide], keep=keep)
        for row, ids_of_row in zip(wide.tolist(), sets or (), strict=sets is not None):
            assert kept is not None
            kept[row] = ids_of_row
    return _RowDraws(token, logprob, kept)


def _draw_top_p(
    scaled: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor, uniform: torch.Tensor, *, keep: bool
) -> _RowDraws:
    """Draw with top-p, then min-p, over the whole vocabulary without sorting it.

    A histogram of the probability mass by logit finds the bin in which top_p is reached, and only that bin is sorted.
    """
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
    return _draw_by_inverse_cdf(weights.masked_fill_(weights < min_p, 0), uniform, keep=keep)


def _first_exceeding(weights: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The first place whose cumulative weight exceeds ``target`` (B, 1); never one of weight 0 while any is positive."""
    cumulative = weights.double().cumsum(-1)
    # Below the total even after rounding, or the search would end behind the last positive weight.
    below = torch.minimum(target, cumulative[:, -1:] * (1 - 1e-12))
    return torch.searchsorted(cumulative, below, right=True).clamp_(max=weights.shape[1] - 1)
