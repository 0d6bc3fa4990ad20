"""Group-relative advantages: the reward less the mean of its group, scaled. numpy, float64 inside. Shapes: G episodes of a group.

    group   A_i = (r_i - mean(r)) / (std(r) + 1e-4)           GRPO: Shao et al. 2024, arXiv:2402.03300, section 4.1.2
    none    A_i = r_i - mean(r)                               Dr. GRPO: Liu et al. 2025, arXiv:2503.20783
    batch   A_i = (r_i - mean(r)) / (std of step + 1e-4)      Liu et al. 2025, "Part I: Tricks or traps", arXiv:2508.08221

The standard deviation has the divisor G - 1 and the epsilon of TRL. Dr. GRPO shows that dividing by that of the group
favours prompts that are nearly always or nearly never solved. Advantages of a group sum to zero. Degenerate cases: advantages.py.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from corrente.algo.advantages import STD_EPS, Rewards, StepRewards, centred, is_flat, spread
from corrente.data.types import Floats


def grpo(step: StepRewards, *, scale_rewards: Literal["group", "batch", "none"]) -> list[Floats]:
    """Advantages (G,) of each group."""
    if scale_rewards == "group":
        return [normalised(rewards_G, tolerance=step.tolerance) for rewards_G in step.rewards]
    divisor = spread(step.rewards) + STD_EPS if scale_rewards == "batch" else 1.0
    return [(centred(r, tolerance=step.tolerance) / divisor).astype(np.float32) for r in step.rewards]


def normalised(values_G: Rewards, *, tolerance: float) -> Floats:
    """(v_i - mean(v)) / (std(v) + 1e-4) of one group; NaN is left out and gives 0, a flat group zeros."""
    if is_flat(values_G, tolerance=tolerance):
        return np.zeros(len(values_G), np.float32)
    scaled = (values_G - np.nanmean(values_G)) / (np.nanstd(values_G, ddof=1) + STD_EPS)
    return np.nan_to_num(scaled, nan=0.0).astype(np.float32)
