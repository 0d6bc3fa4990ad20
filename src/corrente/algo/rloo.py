"""Leave-one-out advantages: the reward less the mean of the others of its group. numpy, float64 inside. Shapes: G episodes.

    A_i = r_i - mean of the other members' rewards = G / (G - 1) * (r_i - mean(r))

Kool et al. 2019, "Buy 4 REINFORCE samples, get a baseline for free"; for language models Ahmadian et al. 2024, arXiv:2402.14740,
equation 5. It is unbiased as it stands, so it is never divided by a standard deviation. Advantages of a group sum to zero.
"""

from __future__ import annotations

import numpy as np

from corrente.algo.advantages import Rewards, StepRewards, is_flat
from corrente.data.types import Floats


def rloo(step: StepRewards) -> list[Floats]:
    """Advantages (G,) of each group."""
    return [leave_one_out(rewards_G, tolerance=step.tolerance) for rewards_G in step.rewards]


def leave_one_out(values_G: Rewards, *, tolerance: float) -> Floats:
    """Each value less the mean of the others, of one group; NaN is left out and gives 0, a flat group zeros."""
    if is_flat(values_G, tolerance=tolerance):
        return np.zeros(len(values_G), np.float32)
    known = int(np.count_nonzero(~np.isnan(values_G)))
    differences = (values_G - np.nanmean(values_G)) * (known / (known - 1))
    return np.nan_to_num(differences, nan=0.0).astype(np.float32)
