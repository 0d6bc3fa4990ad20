"""Advantages with the baseline of least variance. numpy, float64 inside. Shapes: G episodes of a group.

    A_i = r_i - sum(l r) / sum(l)                l: sampled tokens of an episode

Hao et al. 2025, "On-policy RL with optimal reward baseline", arXiv:2505.23585: of least variance where the gradient of an episode
grows with its length. Advantages of a group sum to zero weighted by length. Degenerate case: where nothing was sampled the
baseline is the plain mean.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from corrente.algo.advantages import Rewards, StepRewards, centred, is_flat
from corrente.data.types import Floats


def opo(step: StepRewards) -> list[Floats]:
    """Advantages (G,) of each group."""
    pairs = zip(step.rewards, step.lengths, strict=True)
    return [_of_group(rewards_G, lengths_G, tolerance=step.tolerance) for rewards_G, lengths_G in pairs]


def _of_group(rewards_G: Rewards, lengths_G: NDArray[np.int64], *, tolerance: float) -> Floats:
    if is_flat(rewards_G, tolerance=tolerance):
        return np.zeros(len(rewards_G), np.float32)
    weights_G = np.where(np.isnan(rewards_G), 0, lengths_G).astype(np.float64)
    if not weights_G.any():
        return centred(rewards_G, tolerance=tolerance)
    baseline = np.nansum(weights_G * rewards_G) / weights_G.sum()
    return np.nan_to_num(rewards_G - baseline, nan=0.0).astype(np.float32)
