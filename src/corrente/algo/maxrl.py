"""Maximum-likelihood advantages: the gradient of log(probability of success). numpy, float64 inside. Shapes: G episodes.

    A_i = (r_i - mean(r)) / mean(r)

Tajwar et al. 2026, arXiv:2602.02710. The gradient of the logarithm, where the other estimators have that of the probability
itself: hard prompts count more. Advantages of a group sum to zero. Degenerate case: a group whose mean is not positive gives
zeros, for it is meant for rewards that are not negative.
"""

from __future__ import annotations

import numpy as np

from corrente.algo.advantages import Rewards, StepRewards, is_flat
from corrente.data.types import Floats


def maxrl(step: StepRewards) -> list[Floats]:
    """Advantages (G,) of each group."""
    return [_of_group(rewards_G, tolerance=step.tolerance) for rewards_G in step.rewards]


def _of_group(rewards_G: Rewards, *, tolerance: float) -> Floats:
    if is_flat(rewards_G, tolerance=tolerance) or np.nanmean(rewards_G) <= tolerance:
        return np.zeros(len(rewards_G), np.float32)
    mean = np.nanmean(rewards_G)
    return np.nan_to_num((rewards_G - mean) / mean, nan=0.0).astype(np.float32)
