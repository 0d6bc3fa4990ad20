"""Group reward-decoupled normalisation: several rewards, each scaled on its own before they are summed. numpy, float64 inside.

    z_is = (s_is - mean_s) / (std_s + 1e-4)             of the group, per score s: a function's, an environment's
    x_i  = sum_s weight_s z_is                          A_i = (x_i - mean of step) / (std of step + 1e-4)

Liu et al. 2026, "GDPO", arXiv:2601.05242; TRL's multi_objective_aggregation "normalize_then_sum". A reward that varies much does
not drown one that varies little, and (1, 0) is told apart from (0, 1). Shapes: G episodes, S scores; NaN where a function does
not apply: it is left out of that function's mean and of the sum. Degenerate cases: a function that is flat in a group adds 0;
an episode no function applies to gets 0; a step that is flat gives zeros.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from corrente.algo.advantages import STD_EPS, StepRewards, is_flat, spread
from corrente.algo.grpo import normalised
from corrente.data.types import Floats


def weighted_sum(scores_GS: NDArray[np.float64], *, weights: Sequence[float], tolerance: float) -> NDArray[np.float64]:
    """x (G,): the weighted sum of a group's scores, each scaled on its own; NaN where none applies."""
    out_G = np.zeros(len(scores_GS))
    for column_G, weight in zip(scores_GS.T, weights, strict=True):
        out_G += weight * normalised(column_G, tolerance=tolerance)
    return np.where(np.isnan(scores_GS).all(1), np.nan, out_G)


def gdpo(step: StepRewards) -> list[Floats]:
    """Advantages (G,) of each group."""
    sums = [weighted_sum(scores_GS, weights=step.weights, tolerance=step.tolerance) for scores_GS in step.scores]
    together = np.concatenate(sums) if sums else np.empty(0)
    if is_flat(together, tolerance=step.tolerance):
        return [np.zeros(len(x), np.float32) for x in sums]
    mean, std = np.nanmean(together), spread(sums) + STD_EPS
    return [np.nan_to_num((x - mean) / std, nan=0.0).astype(np.float32) for x in sums]
