"""What one optimizer step reports. numpy only, no state. Shapes: K trained tokens of the whole step, flat.

train/loss, train/grad_norm (before clipping), train/lr
train/tokens                  trained tokens                  train/distinct_tokens   positions forwarded
train/padded_tokens           positions one padded batch would have forwarded
train/clip_fraction[_low|_high]   trained tokens whose gradient the objective cut (all; too unlikely; too likely)
ratio/mean, ratio/max         current over behaviour policy
ess                           (sum r)^2 / (K sum r^2): 1 when all ratios are equal
kl/behaviour_k3               mean r - 1 - log r: from the policy that sampled to the current one
kl/reference                  mean k3 to the frozen reference; only with algo.beta > 0
entropy                       of the current policy where it was trained, at the sampling temperature
lag<b>/tokens|ratio_mean|kl_k3        the same by lag bucket 0, 1, 2, 3-4, 5+; a bucket without tokens is left out
mismatch/logprob_gap_mean|max         |learner - behaviour| over lag-0 tokens: numerics, apart from staleness
learner/busy_s                seconds this step computed
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from corrente.types import Mask, Tokens

Values = NDArray[np.float64]

BUCKETS = (("0", 0, 0), ("1", 1, 1), ("2", 2, 2), ("3-4", 3, 4), ("5+", 5, np.iinfo(np.int32).max))


class Trace(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Per trained token (K,) of a micro-batch, or of a whole step: what the metrics are made of."""

    logprobs_K: Values
    behaviour_K: Values
    entropy_K: Values
    lags_K: Tokens
    low_K: Mask
    high_K: Mask
    cut_K: Mask
    reference_K: Values | None = None


def join(traces: Sequence[Trace]) -> Trace:
    """The micro-batches of a step as one."""
    names = [name for name in Trace.__struct_fields__ if getattr(traces[0], name) is not None]
    fields: dict[str, Any] = {name: np.concatenate([getattr(trace, name) for trace in traces]) for name in names}
    return Trace(**fields)


def of_tokens(trace: Trace) -> dict[str, float]:
    """Every metric above that is made of trained tokens."""
    log_ratio_K = np.clip(trace.logprobs_K - trace.behaviour_K, -20, 20)
    ratio_K = np.exp(log_ratio_K)
    k3_K = ratio_K - 1 - log_ratio_K
    out = {
        "train/tokens": float(len(ratio_K)),
        "train/clip_fraction": float(trace.cut_K.mean()),
        "train/clip_fraction_low": float(trace.low_K.mean()),
        "train/clip_fraction_high": float(trace.high_K.mean()),
        "ratio/mean": float(ratio_K.mean()),
        "ratio/max": float(ratio_K.max()),
        "kl/behaviour_k3": float(k3_K.mean()),
        "ess": float(ratio_K.sum() ** 2 / (len(ratio_K) * np.square(ratio_K).sum())),
        "entropy": float(trace.entropy_K.mean()),
    }
    for bucket, mine_K in _buckets(trace.lags_K):
        out[f"lag{bucket}/tokens"] = float(mine_K.sum())
        out[f"lag{bucket}/ratio_mean"] = float(ratio_K[mine_K].mean())
        out[f"lag{bucket}/kl_k3"] = float(k3_K[mine_K].mean())
    return out | _mismatch(trace) | _reference(trace)


def nothing_trained() -> dict[str, float]:
    """A step without rows: nothing was computed and nothing moved."""
    names = ("train/loss", "train/grad_norm", "train/tokens", "train/distinct_tokens", "train/padded_tokens")
    return dict.fromkeys(names, 0.0)


def _buckets(lags_K: Tokens) -> Iterator[tuple[str, Mask]]:
    for name, least, most in BUCKETS:
        mine_K = (lags_K >= least) & (lags_K <= most)
        if mine_K.any():
            yield name, mine_K


def _mismatch(trace: Trace) -> dict[str, float]:
    fresh_K = trace.lags_K == 0
    if not fresh_K.any():
        return {}
    gap_K = np.abs(trace.logprobs_K - trace.behaviour_K)[fresh_K]
    return {"mismatch/logprob_gap_mean": float(gap_K.mean()), "mismatch/logprob_gap_max": float(gap_K.max())}


def _reference(trace: Trace) -> dict[str, float]:
    if trace.reference_K is None:
        return {}
    log_x_K = np.clip(trace.reference_K - trace.logprobs_K, -20, 20)
    return {"kl/reference": float((np.exp(log_x_K) - 1 - log_x_K).mean())}
