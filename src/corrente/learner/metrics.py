"""The numbers one optimizer step reports. numpy only. Shapes: K trained tokens of a micro-batch, flat.

Every number is a sum, a weighted mean or a maximum over tokens, and is recorded as such (reductions.py): micro-batches of a
step and the ranks of a learner add up to what one batch of all of it would have given. The one number that is not of this kind is
computed from those at the end: with r = current over behaviour policy, over n tokens,

    ess = (sum r)^2 / (n sum r^2)        1 when all ratios are equal, 1/n when one of them is everything

Names, units and meanings are in observe/catalogue.py, which is docs/reference/metrics.md. In short:

train/..., ratio/..., kl/...    over all trained tokens
lag<b>/...                      over those of lag bucket 0, 1, 2, 3-4, 5+; a bucket without tokens is left out
mismatch/...                    over tokens of the very weights the learner holds: numerics, apart from staleness
mismatch_clean/...              over those of them whose whole completion is of these weights
mismatch_mixed/...              over the others: older weights sampled what stands before them, and, where the engine kept their
                                keys and values (inflight swap), were attended to
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from corrente.data.age import buckets
from corrente.data.reductions import Accumulator
from corrente.data.types import Mask, Tokens

Values = NDArray[np.float64]

LARGEST_LOG = 20.0
"""Log-ratios are clipped to this before they are exponentiated: for the report alone."""


class Trace(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Values per trained token (K,) of a micro-batch that the metrics are computed from. Masks as in algo.base.Loss and Row."""

    logprobs_K: Values
    behaviour_K: Values
    entropy_K: Values
    lags_K: Tokens
    mixed_K: Mask
    low_K: Mask
    high_K: Mask
    cut_K: Mask
    rejected_K: Mask
    whole_K: Mask
    reference_K: Values | None = None
    teacher_K: Values | None = None
    """NaN where no teacher answered."""


class _Ratios(msgspec.Struct, frozen=True, eq=False):
    """The ratio r of some tokens, k3 = r - 1 - log r, and |log r|."""

    ratio_K: Values
    k3_K: Values
    gap_K: Values

    def select(self, mine_K: Mask) -> _Ratios:
        return _Ratios(self.ratio_K[mine_K], self.k3_K[mine_K], self.gap_K[mine_K])


def record_tokens(out: Accumulator, trace: Trace, *, fresh: bool = True) -> None:
    """Add the tokens of a micro-batch to the report of the step.

    ``fresh``: the learner holds the very weights of the step's version, which it does not between two publishes; without that
    numerics cannot be told from staleness, and mismatch/... is left out.
    """
    log_ratio_K = np.clip(trace.logprobs_K - trace.behaviour_K, -LARGEST_LOG, LARGEST_LOG)
    ratio_K = np.exp(log_ratio_K)
    all_of = _Ratios(ratio_K, ratio_K - 1 - log_ratio_K, np.abs(trace.logprobs_K - trace.behaviour_K))
    everything_K = np.ones(len(ratio_K), np.bool_)
    _record_ratios(out, all_of, mean="ratio/mean", most="ratio/max", square="ratio/square", k3="kl/behaviour_k3")
    _record_tokens(out, trace, everything_K, area="train")
    _mean(out, "train/clip_fraction_low", trace.low_K)
    _mean(out, "train/clip_fraction_high", trace.high_K)
    for bucket, mine_K in buckets(trace.lags_K):
        area = f"lag{bucket}"
        names = {"mean": f"{area}/ratio_mean", "most": f"{area}/ratio_max", "square": f"{area}/ratio_square"}
        _record_ratios(out, all_of.select(mine_K), k3=f"{area}/kl_k3", **names)
        _record_tokens(out, trace, mine_K, area=area)
    if fresh:
        _record_mismatch(out, trace, all_of)
    _record_reference(out, trace)
    _record_distill(out, trace)


def step_report(sums: Accumulator) -> dict[str, float]:
    """The report of a step by name; ess is computed from the mean ratio and the mean of its square."""
    out = sums.reduced()
    for name in [name for name in out if name.endswith("/ratio_square")] + ["ratio/square"]:
        if name in out:
            square, area = out.pop(name), name.partition("/")[0]
            mean, ess = ("ratio/mean", "ratio/ess") if area == "ratio" else (f"{area}/ratio_mean", f"{area}/ess")
            out[ess] = out[mean] ** 2 / square
    return out


def iteration_report(reports: Sequence[dict[str, float]]) -> dict[str, float]:
    """The numbers that the updates after a step's first one add to its report; ratios and lags are those the step began with."""
    return {"train/last_clip_fraction": reports[-1]["train/clip_fraction"]} if len(reports) > 1 else {}


def empty_report() -> dict[str, float]:
    """The report of a step without rows: nothing was computed and nothing moved."""
    names = ("train/loss", "train/grad_norm", "train/tokens", "train/distinct_tokens", "train/padded_tokens")
    return dict.fromkeys(names, 0.0)


def _mean(out: Accumulator, name: str, values_K: NDArray[np.generic]) -> None:
    if len(values_K):
        out.record(name, float(values_K.mean(dtype=np.float64)), how="mean", weight=len(values_K))


def _most(out: Accumulator, name: str, values_K: Values) -> None:
    if len(values_K):
        out.record(name, float(values_K.max()), how="max")


def _record_ratios(out: Accumulator, of: _Ratios, *, mean: str, most: str, square: str, k3: str) -> None:
    _mean(out, mean, of.ratio_K)
    _mean(out, square, np.square(of.ratio_K))
    _most(out, most, of.ratio_K)
    _mean(out, k3, of.k3_K)


def _record_tokens(out: Accumulator, trace: Trace, mine_K: Mask, *, area: str) -> None:
    out.record(f"{area}/tokens", float(mine_K.sum()), how="sum")
    _mean(out, f"{area}/clip_fraction", trace.cut_K[mine_K])
    _mean(out, f"{area}/rejected_fraction", trace.rejected_K[mine_K])
    _mean(out, f"{area}/rejected_sequence_fraction", trace.whole_K[mine_K])
    _mean(out, f"{area}/entropy", trace.entropy_K[mine_K])


def _record_mismatch(out: Accumulator, trace: Trace, all_of: _Ratios) -> None:
    fresh_K = trace.lags_K == 0
    areas = (
        ("mismatch", fresh_K),
        ("mismatch_clean", fresh_K & ~trace.mixed_K),
        ("mismatch_mixed", fresh_K & trace.mixed_K),
    )
    for area, mine_K in areas:
        if not mine_K.any():
            continue
        of = all_of.select(mine_K)
        out.record(f"{area}/tokens", float(mine_K.sum()), how="sum")
        _mean(out, f"{area}/logprob_gap_mean", of.gap_K)
        _most(out, f"{area}/logprob_gap_max", of.gap_K)
        _mean(out, f"{area}/kl_k3", of.k3_K)


def _record_reference(out: Accumulator, trace: Trace) -> None:
    if trace.reference_K is not None:
        log_x_K = np.clip(trace.reference_K - trace.logprobs_K, -LARGEST_LOG, LARGEST_LOG)
        _mean(out, "kl/reference", np.exp(log_x_K) - 1 - log_x_K)


def _record_distill(out: Accumulator, trace: Trace) -> None:
    if trace.teacher_K is None:
        return
    taught_K = ~np.isnan(trace.teacher_K)
    gap_K = np.clip((trace.logprobs_K - trace.teacher_K)[taught_K], -LARGEST_LOG, LARGEST_LOG)
    out.record("distill/tokens", float(len(gap_K)), how="sum")
    _mean(out, "distill/reverse_kl", gap_K)
    _mean(out, "distill/reverse_kl_k3", np.exp(-gap_K) - 1 + gap_K)
