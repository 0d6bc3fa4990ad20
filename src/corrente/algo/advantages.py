"""Advantages from the mean of a group or of its others: GRPO, Dr. GRPO, RLOO. numpy, float64 inside.

Shapes: G episodes of a group. ``rewards_G`` may hold NaN where an episode has no reward: it is left out of the baseline and
its advantage is 0. In every case the advantages of the others sum to zero.

Degenerate groups give zeros, never NaN: fewer than two rewards, or rewards that differ by no more than ``tolerance`` (float
noise must not be divided by its own standard deviation and come out full size). The other estimators are in estimators.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

STD_EPS = 1e-4
"""Added to the standard deviation, as TRL does: rewards 1e-4 apart are damped instead of blown up."""


def as_rewards(rewards: Sequence[float | None]) -> NDArray[np.float64]:
    """Rewards (G,) as an array, None as NaN."""
    return np.array([np.nan if reward is None else reward for reward in rewards], np.float64)


def is_flat(rewards_G: NDArray[np.float64], *, tolerance: float) -> bool:
    """Whether these rewards carry no signal: fewer than two, or all within ``tolerance`` of one another."""
    known = rewards_G[~np.isnan(rewards_G)]
    return len(known) < 2 or bool(np.ptp(known) <= tolerance)


def spread(values: Sequence[NDArray[np.float64]]) -> float:
    """Sample standard deviation of all values of several groups together, NaN left out; 0 of fewer than two."""
    known = np.concatenate([v[~np.isnan(v)] for v in values]) if values else np.empty(0)
    return float(np.std(known, ddof=1)) if len(known) > 1 else 0.0


def grpo(rewards_G: NDArray[np.float64], *, scale: bool, tolerance: float) -> NDArray[np.float32]:
    """A_i = (r_i - mean(r)) / (std(r) + 1e-4); without ``scale`` only r_i - mean(r).

    GRPO: Shao et al. 2024, arXiv:2402.03300, section 4.1.2, with the sample standard deviation (divisor G - 1) and epsilon of
    TRL. Unscaled: Dr. GRPO, Liu et al. 2025, arXiv:2503.20783, which shows that the division favours prompts that are
    nearly always or nearly never solved.
    """
    if is_flat(rewards_G, tolerance=tolerance):
        return np.zeros(len(rewards_G), np.float32)
    centred = rewards_G - np.nanmean(rewards_G)
    if scale:
        centred = centred / (np.nanstd(rewards_G, ddof=1) + STD_EPS)
    return np.nan_to_num(centred, nan=0.0).astype(np.float32)


def rloo(rewards_G: NDArray[np.float64], *, tolerance: float) -> NDArray[np.float32]:
    """A_i = r_i - mean of the other members' rewards = G / (G - 1) * (r_i - mean(r)).

    Leave-one-out baseline: Kool et al. 2019; for language models Ahmadian et al. 2024, arXiv:2402.14740, equation 5. It is
    unbiased as it stands, so it is never divided by a standard deviation.
    """
    if is_flat(rewards_G, tolerance=tolerance):
        return np.zeros(len(rewards_G), np.float32)
    known = int(np.count_nonzero(~np.isnan(rewards_G)))
    centred = (rewards_G - np.nanmean(rewards_G)) * (known / (known - 1))
    return np.nan_to_num(centred, nan=0.0).astype(np.float32)
