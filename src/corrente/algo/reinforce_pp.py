"""Advantages scaled over the step. numpy, float64 inside. Shapes: N groups of a step, G episodes of a group.

    reinforce_pp            (r - mean of step) / (std of step + 1e-4)
    reinforce_pp_baseline   (r - mean of group) / (std of these differences over the step + 1e-4)

REINFORCE++: Hu et al. 2025, arXiv:2501.03262. The first has no group baseline, so it works with one episode a prompt, and a
group of equal rewards teaches as any other; its advantages sum to zero over the step. Those of the second sum to zero in
each group. Degenerate case: a step that is flat gives zeros.
"""

from __future__ import annotations

import numpy as np

from corrente.algo.advantages import STD_EPS, StepRewards, centred, is_flat, spread
from corrente.data.types import Floats


def reinforce_pp(step: StepRewards) -> list[Floats]:
    """Advantages (G,) of each group, centred and scaled over the step."""
    together = np.concatenate(step.rewards) if step.rewards else np.empty(0)
    if is_flat(together, tolerance=step.tolerance):
        return [np.zeros(len(r), np.float32) for r in step.rewards]
    mean, std = np.nanmean(together), spread(step.rewards) + STD_EPS
    return [np.nan_to_num((r - mean) / std, nan=0.0).astype(np.float32) for r in step.rewards]


def reinforce_pp_baseline(step: StepRewards) -> list[Floats]:
    """Advantages (G,) of each group, centred by group and scaled over the step."""
    differences = [np.where(np.isnan(r), np.nan, centred(r, tolerance=step.tolerance)) for r in step.rewards]
    std = spread(differences) + STD_EPS
    return [np.nan_to_num(d / std, nan=0.0).astype(np.float32) for d in differences]
