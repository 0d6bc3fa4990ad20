"""Group reward-decoupled normalisation: several rewards, each scaled on its own before they are summed. numpy, float64 inside.

    z_ik = (s_ik - mean_k) / (std_k + 1e-4)             of the group, per score k: a function's, an environment's
    x_i  = sum_k weight_k z_ik                          A_i = (x_i - mean of step) / (std of step + 1e-4)

Liu et al. 2026, "GDPO", arXiv:2601.05242; TRL's multi_objective_aggregation "normalize_then_sum". A reward that varies much does
not drown one that varies little, and (1, 0) is told apart from (0, 1). Shapes: G episodes, K functions; NaN where a function does
not apply: it is left out of that function's mean and of the sum. Degenerate cases: a function that is flat in a group adds 0;
an episode no function applies to gets 0; a step that is flat gives zeros.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from corrente.algo.advantages import STD_EPS, grpo, is_flat, spread
from corrente.data.types import Episode, Floats


def table(episodes: Sequence[Episode], names: Sequence[str]) -> NDArray[np.float64]:
    """Scores (G, K) of a group, NaN for "does not apply"."""
    rows = [[episode.scores.get(name) for name in names] for episode in episodes]
    return np.array([[np.nan if s is None else s for s in row] for row in rows], np.float64).reshape(
        len(rows), len(names)
    )


def combined(scores_GK: NDArray[np.float64], *, weights: Sequence[float], tolerance: float) -> NDArray[np.float64]:
    """x (G,): the weighted sum of a group's scores, each scaled on its own; NaN where none applies."""
    out_G = np.zeros(len(scores_GK))
    for column_G, weight in zip(scores_GK.T, weights, strict=True):
        out_G += weight * grpo(column_G, scale=True, tolerance=tolerance)
    return np.where(np.isnan(scores_GK).all(1), np.nan, out_G)


def gdpo(scores: Sequence[NDArray[np.float64]], *, weights: Sequence[float], tolerance: float) -> list[Floats]:
    """Advantages per group of a step, from its groups' tables of scores."""
    sums = [combined(scores_GK, weights=weights, tolerance=tolerance) for scores_GK in scores]
    together = np.concatenate(sums) if sums else np.empty(0)
    if is_flat(together, tolerance=tolerance):
        return [np.zeros(len(x), np.float32) for x in sums]
    mean, std = np.nanmean(together), spread(sums) + STD_EPS
    return [np.nan_to_num((x - mean) / std, nan=0.0).astype(np.float32) for x in sums]


def flat(scores_GK: NDArray[np.float64], *, tolerance: float) -> bool:
    """Whether no function tells the episodes of this group apart."""
    return all(is_flat(column_G, tolerance=tolerance) for column_G in scores_GK.T)


def names_of(groups: Sequence[Sequence[Episode]]) -> tuple[str, ...]:
    """The functions that scored a step, in the order of the config, which is that of every episode's ``scores``."""
    return tuple(dict.fromkeys(name for group in groups for episode in group for name in episode.scores))
