"""Drawing against an independent numpy account of what temperature, top-k, top-p and min-p leave."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from corrente.data.types import Sampling
from corrente.engine.embedded.sampling import compile_rules, draw, uniforms

VOCABULARY = 1100
MIXES = [
    Sampling(),
    Sampling(temperature=0.7),
    Sampling(top_k=1),
    Sampling(top_k=20),
    Sampling(top_k=700),
    Sampling(top_p=0.5),
    Sampling(top_p=0.97),
    Sampling(top_p=0.9999),
    Sampling(min_p=0.1),
    Sampling(temperature=1.7, top_k=50, top_p=0.8),
    Sampling(temperature=0.6, top_p=0.9, min_p=0.05),
    Sampling(temperature=2.0, top_k=400, top_p=0.95, min_p=0.02),
    Sampling(top_k=5000),
]


def kept_distribution(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    """Probabilities (V,) in float64, by sorting everything and taking each rule in turn."""
    order = np.argsort(-logits, kind="stable")
    scaled = logits[order].astype(np.float64) / sampling.temperature
    p = np.exp(scaled - scaled[0])
    p /= p.sum()
    if sampling.top_k:
        p[sampling.top_k :] = 0
        p /= p.sum()
    kept, mass = np.zeros(len(p), bool), 0.0
    for at, value in enumerate(p):
        kept[at] = mass < sampling.top_p and value > 0
        mass += value
    p = np.where(kept, p, 0)
    p[p < sampling.min_p * p.max()] = 0
    out = np.zeros(len(p))
    out[order] = p / p.sum()
    return out


def sample(logits: np.ndarray, samplings: list[Sampling], *, seeds: list[int], position: int = 3) -> tuple:
    rules = compile_rules(
        list(zip(samplings, seeds, strict=True)), vocabulary=logits.shape[1], device=torch.device("cpu")
    )
    return draw(torch.from_numpy(logits.copy(order="K")), rules, np.full(len(seeds), position, np.int64))


def random_logits(rows: int, *, spread: float = 2.0, vocabulary: int = VOCABULARY) -> np.ndarray:
    return (np.random.default_rng(0).normal(size=(rows, vocabulary)) * spread).astype(np.float32)


@pytest.mark.parametrize("sampling", MIXES, ids=str)
def test_logprobs_are_those_of_the_truncated_distribution(sampling: Sampling):
    logits = random_logits(64)
    tokens, logprobs, _ = sample(logits, [sampling] * 64, seeds=list(range(64)))
    for row, token, logprob in zip(logits, tokens, logprobs, strict=True):
        assert logprob == pytest.approx(np.log(kept_distribution(row, sampling)[token]), abs=1e-5)


@pytest.mark.parametrize("sampling", MIXES, ids=str)
def test_draws_follow_the_truncated_distribution(sampling: Sampling):
    """Of 4000 draws from one row, no token's count is further than 5 standard deviations from what is expected."""
    count = 4000
    row = random_logits(1, spread=3.0)
    tokens, _, _ = sample(np.repeat(row, count, 0), [sampling] * count, seeds=list(range(count)))
    expected = kept_distribution(row[0], sampling)
    seen = np.bincount(tokens, minlength=VOCABULARY) / count
    assert not seen[expected == 0].any()
    deviation = np.sqrt(expected * (1 - expected) / count)
    assert (np.abs(seen - expected) <= 5 * deviation + 1.5 / count).all()


def test_mixed_batch_draws_what_each_row_draws_alone():
    logits = random_logits(len(MIXES) + 1)
    mixes = [*MIXES, Sampling(temperature=0)]
    together = sample(logits, mixes, seeds=list(range(len(mixes))))
    for at, mix in enumerate(mixes):
        alone = sample(logits[at : at + 1], [mix], seeds=[at])
        assert alone[0][0] == together[0][at]
        assert alone[1][0] == pytest.approx(together[1][at], abs=1e-5)


def test_greedy_takes_the_largest_logit_and_reports_the_untempered_logprob():
    logits = random_logits(8)
    tokens, logprobs, _ = sample(logits, [Sampling(temperature=0, top_k=3, top_p=0.5)] * 8, seeds=[0] * 8)
    assert tokens.tolist() == logits.argmax(-1).tolist()
    expected = [np.log(kept_distribution(row, Sampling())[row.argmax()]) for row in logits]
    np.testing.assert_allclose(logprobs, expected, atol=1e-5)


def test_flat_distribution_widens_the_candidates_until_they_suffice():
    logits = random_logits(16, spread=0.01, vocabulary=5000)
    tokens, logprobs, _ = sample(logits, [Sampling(top_p=0.9)] * 16, seeds=list(range(16)))
    assert len(set(tokens.tolist())) > 8
    np.testing.assert_allclose(logprobs, [-np.log(4500)] * 16, atol=0.05)


@pytest.mark.parametrize(
    "sampling", [Sampling(top_p=0.9), Sampling(top_p=0.999, min_p=0.003, temperature=1.3)], ids=str
)
def test_wide_nucleus_is_exact_among_equal_logits(sampling: Sampling):
    """Half-precision logits, of which many are equal, over a vocabulary far larger than the first candidates."""
    logits = random_logits(24, vocabulary=9000).astype(np.float16).astype(np.float32)
    tokens, logprobs, _ = sample(logits, [sampling] * 24, seeds=list(range(24)))
    for row, token, logprob in zip(logits, tokens, logprobs, strict=True):
        kept = kept_distribution(row, sampling)
        assert (kept > 0).sum() > 500
        assert logprob == pytest.approx(np.log(kept[token]), abs=2e-5)


def test_draws_do_not_depend_on_which_of_two_near_equal_logits_is_larger():
    """Noise of one part in a million, such as another batch size makes, moves no draw but one on a border."""
    logits = np.round(random_logits(400), 1)
    noisy = logits + np.random.default_rng(1).normal(size=logits.shape).astype(np.float32) * 1e-6
    for sampling in (Sampling(top_k=20), Sampling(top_p=0.5), Sampling(top_p=0.95)):
        seeds = list(range(400))
        a, _, _ = sample(logits, [sampling] * 400, seeds=seeds)
        b, _, _ = sample(noisy, [sampling] * 400, seeds=seeds)
        edge = np.array([_ties_at_the_edge(row, sampling) for row in logits])
        assert (a != b)[~edge].mean() < 0.01


def _ties_at_the_edge(row: np.ndarray, sampling: Sampling) -> bool:
    """Whether the least likely token that is kept has an equal that is not: noise may then exchange them."""
    kept = kept_distribution(row, sampling) > 0
    return bool((row[~kept] == row[kept].min()).any())


def test_peaked_distribution_gives_no_token_of_weight_zero():
    logits = np.full((200, VOCABULARY), -1e4, np.float32)
    logits[:, 777] = 0
    tokens, logprobs, _ = sample(logits, [Sampling()] * 200, seeds=list(range(200)))
    assert set(tokens.tolist()) == {777}
    assert not logprobs.any()


def test_likeliest_token_is_always_kept():
    logits = random_logits(8)
    tokens, logprobs, _ = sample(logits, [Sampling(top_p=0.0)] * 8, seeds=list(range(8)))
    assert tokens.tolist() == logits.argmax(-1).tolist()
    np.testing.assert_allclose(logprobs, 0, atol=1e-6)


def test_logits_in_either_memory_order_draw_alike():
    logits = random_logits(8)
    a = sample(logits, [Sampling()] * 8, seeds=list(range(8)))
    b = sample(np.asfortranarray(logits), [Sampling()] * 8, seeds=list(range(8)))
    assert a[0].tolist() == b[0].tolist()


def test_uniforms_are_uniform_in_seed_and_in_position():
    seeds = np.arange(20000, dtype=np.uint64)
    zeros = np.zeros(20000, np.int64)
    for values in (uniforms(seeds, zeros), uniforms(zeros.astype(np.uint64), np.arange(20000))):
        assert 0 <= values.min() <= values.max() < 1
        counts = np.histogram(values, 50, (0, 1))[0]
        assert ((counts - 400) ** 2 / 400).sum() < 90  # chi-square with 49 degrees of freedom: 99.97 %
        assert abs(np.corrcoef(values[1:], values[:-1])[0, 1]) < 0.03


def test_uniforms_repeat():
    a = uniforms(np.array([7, 7], np.uint64), np.array([1, 2]))
    assert a.tolist() == uniforms(np.array([7, 7], np.uint64), np.array([1, 2])).tolist()
    assert a[0] != a[1]
