"""What a step reports does not depend on how its tokens are cut into micro-batches, nor over how many workers."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from corrente.data.reductions import Accumulator
from corrente.learner import metrics
from corrente.learner.metrics import Trace

TOKENS = 203


def trace(seed: int = 0, *, count: int = TOKENS, lags: tuple[int, ...] = (0, 1, 2, 3, 4, 7)) -> Trace:
    rng = np.random.default_rng(seed)
    behaviour = np.log(rng.uniform(0.05, 0.95, count))
    flags = {name: rng.random(count) < 0.3 for name in ("low_K", "high_K", "cut_K", "rejected_K", "whole_K", "mixed_K")}
    return Trace(
        logprobs_K=behaviour + rng.normal(0, 0.3, count),
        behaviour_K=behaviour,
        entropy_K=rng.uniform(0, 2, count),
        lags_K=rng.choice(lags, count).astype(np.int32),
        reference_K=behaviour + rng.normal(0, 0.3, count),
        teacher_K=np.where(rng.random(count) < 0.5, np.nan, behaviour),
        **flags,
    )


def cut(whole: Trace, edges: list[int]) -> list[Trace]:
    bounds = [0, *edges, len(whole.lags_K)]
    return [
        Trace(**{name: getattr(whole, name)[start:stop] for name in Trace.__struct_fields__})
        for start, stop in pairwise(bounds)
    ]


def report(parts: list[Trace], *, fresh: bool = True) -> dict[str, float]:
    sums = Accumulator()
    for part in parts:
        metrics.record_tokens(sums, part, fresh=fresh)
    return metrics.step_report(sums)


@pytest.mark.parametrize("edges", [[1], [100], [7, 8, 150], list(range(1, TOKENS))])
def test_report_is_the_same_for_every_cut_into_micro_batches(edges: list[int]):
    whole = trace()
    assert report(cut(whole, edges)) == pytest.approx(report([whole]), rel=1e-9)


def test_report_is_the_same_over_several_workers():
    whole = trace()
    mine, theirs = Accumulator(), Accumulator()
    for part in cut(whole, [50, 90])[:2]:
        metrics.record_tokens(mine, part)
    metrics.record_tokens(theirs, cut(whole, [50, 90])[2])
    mine.merge(theirs)
    assert metrics.step_report(mine) == pytest.approx(report([whole]), rel=1e-9)


def test_bucket_reports_its_own_tokens_alone():
    whole = trace()
    of = whole.lags_K >= 5
    ratio = np.exp(whole.logprobs_K - whole.behaviour_K)[of]
    found = report([whole])
    want = {
        "lag5+/tokens": of.sum(),
        "lag5+/ratio_mean": ratio.mean(),
        "lag5+/ratio_max": ratio.max(),
        "lag5+/ess": ratio.sum() ** 2 / (of.sum() * (ratio**2).sum()),
        "lag5+/kl_k3": (ratio - 1 - np.log(ratio)).mean(),
        "lag5+/clip_fraction": whole.cut_K[of].mean(),
        "lag5+/rejected_fraction": whole.rejected_K[of].mean(),
        "lag5+/rejected_sequence_fraction": whole.whole_K[of].mean(),
        "lag5+/entropy": whole.entropy_K[of].mean(),
    }
    assert {name: found[name] for name in found if name.startswith("lag5+")} == pytest.approx(want)


def test_ess_by_hand():
    """Ratios 1, 1, 2: (4)^2 / (3 * 6)."""
    part = trace(count=3, lags=(0,))
    ratio = np.array([1.0, 1.0, 2.0])
    fixed = Trace(
        **{
            **{name: getattr(part, name) for name in Trace.__struct_fields__},
            "logprobs_K": part.behaviour_K + np.log(ratio),
        }
    )
    assert report([fixed])["ratio/ess"] == report([fixed])["lag0/ess"] == pytest.approx(16 / 18)


def test_mismatch_tells_clean_from_mixed_prefixes():
    whole = trace()
    gap, fresh = np.abs(whole.logprobs_K - whole.behaviour_K), whole.lags_K == 0
    found = report([whole])
    for area, mine in (
        ("mismatch", fresh),
        ("mismatch_clean", fresh & ~whole.mixed_K),
        ("mismatch_mixed", fresh & whole.mixed_K),
    ):
        assert found[f"{area}/tokens"] == mine.sum()
        assert found[f"{area}/logprob_gap_mean"] == pytest.approx(gap[mine].mean())
        assert found[f"{area}/logprob_gap_max"] == pytest.approx(gap[mine].max())


def test_mismatch_is_not_known_between_two_publishes():
    assert not [name for name in report([trace()], fresh=False) if name.startswith("mismatch")]


def test_micro_batch_without_fresh_tokens_changes_no_mismatch():
    fresh, old = trace(lags=(0,)), trace(1, lags=(2,))
    assert report([fresh, old])["mismatch/logprob_gap_mean"] == report([fresh])["mismatch/logprob_gap_mean"]
