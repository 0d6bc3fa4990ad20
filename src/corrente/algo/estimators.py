"""What an episode earned beyond its baseline, by the names of ``algo.advantage``. numpy, float64 inside.

Shapes: N groups of a step, G episodes each (G may differ); ``rewards`` is a list of N arrays (G,), NaN where an episode has no
reward: it is left out of every mean, and its advantage is 0.

    grpo                    (r - mean) / (std + 1e-4)            of the group; std of the step, or none, by scale_rewards
    rloo                    r - mean of the others               advantages.py
    reinforce_pp            (r - mean of step) / std of step     no group baseline: works with one episode a prompt.
                                                                 REINFORCE++: Hu et al. 2025, arXiv:2501.03262
    reinforce_pp_baseline   (r - mean of group) / std of step    of these differences over the step. The same paper
    maxrl                   (r - mean) / mean                    the gradient of log(probability of success), not of it: hard
                                                                 prompts count more. Tajwar et al. 2026, arXiv:2602.02710
    opo                     r - sum(l r) / sum(l)                l: sampled tokens; the baseline of least variance where gradients
                                                                 grow with length. Hao et al. 2025, arXiv:2505.23585
    gdpo                    gdpo.py                              several rewards, each scaled on its own

The two with a mean baseline alone (grpo without the step's std, rloo) and maxrl sum to zero in each group; opo does weighted by
length, reinforce_pp over the step. Degenerate cases: a group that is flat (advantages.py) gets zeros from every estimator
that has a group baseline; a step that is flat from reinforce_pp; a group whose mean is not positive from maxrl, which
is meant for rewards that are not negative.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from corrente.algo.advantages import STD_EPS, grpo, is_flat, rloo, spread
from corrente.data.types import Floats

Rewards = Sequence[NDArray[np.float64]]
Lengths = Sequence[NDArray[np.int64]]


def batch_grpo(rewards: Rewards, *, tolerance: float) -> list[Floats]:
    """Centred by group, scaled by the standard deviation of the step's rewards. arXiv:2508.08221."""
    std = spread(rewards) + STD_EPS
    return [(grpo(r, scale=False, tolerance=tolerance) / std).astype(np.float32) for r in rewards]


def reinforce_pp(rewards: Rewards, *, tolerance: float) -> list[Floats]:
    """Centred and scaled over the step."""
    together = np.concatenate(rewards) if rewards else np.empty(0)
    if is_flat(together, tolerance=tolerance):
        return [np.zeros(len(r), np.float32) for r in rewards]
    mean, std = np.nanmean(together), spread(rewards) + STD_EPS
    return [np.nan_to_num((r - mean) / std, nan=0.0).astype(np.float32) for r in rewards]


def reinforce_pp_baseline(rewards: Rewards, *, tolerance: float) -> list[Floats]:
    """Centred by group, scaled by the standard deviation of what that leaves over the step."""
    centred = [np.where(np.isnan(r), np.nan, grpo(r, scale=False, tolerance=tolerance)) for r in rewards]
    std = spread(centred) + STD_EPS
    return [np.nan_to_num(c / std, nan=0.0).astype(np.float32) for c in centred]


def maxrl(rewards_G: NDArray[np.float64], *, tolerance: float) -> Floats:
    """Centred by group, divided by the group's mean."""
    if is_flat(rewards_G, tolerance=tolerance) or np.nanmean(rewards_G) <= tolerance:
        return np.zeros(len(rewards_G), np.float32)
    mean = np.nanmean(rewards_G)
    return np.nan_to_num((rewards_G - mean) / mean, nan=0.0).astype(np.float32)


def opo(rewards_G: NDArray[np.float64], lengths_G: NDArray[np.int64], *, tolerance: float) -> Floats:
    """Less the mean of the group weighted by length; by the plain mean where nothing was sampled."""
    if is_flat(rewards_G, tolerance=tolerance):
        return np.zeros(len(rewards_G), np.float32)
    weights_G = np.where(np.isnan(rewards_G), 0, lengths_G).astype(np.float64)
    if not weights_G.any():
        return grpo(rewards_G, scale=False, tolerance=tolerance)
    baseline = np.nansum(weights_G * rewards_G) / weights_G.sum()
    return np.nan_to_num(rewards_G - baseline, nan=0.0).astype(np.float32)


Estimator = Callable[[Rewards, Lengths, str, float], list[Floats]]


def _grpo(rewards: Rewards, lengths: Lengths, scale: str, tolerance: float) -> list[Floats]:
    if scale == "batch":
        return batch_grpo(rewards, tolerance=tolerance)
    return [grpo(r, scale=scale == "group", tolerance=tolerance) for r in rewards]


ESTIMATORS: Mapping[str, Estimator] = {
    "grpo": _grpo,
    "rloo": lambda rewards, lengths, scale, tolerance: [rloo(r, tolerance=tolerance) for r in rewards],
    "reinforce_pp": lambda rewards, lengths, scale, tolerance: reinforce_pp(rewards, tolerance=tolerance),
    "reinforce_pp_baseline": lambda rewards, lengths, scale, tolerance: reinforce_pp_baseline(
        rewards, tolerance=tolerance
    ),
    "maxrl": lambda rewards, lengths, scale, tolerance: [maxrl(r, tolerance=tolerance) for r in rewards],
    "opo": lambda rewards, lengths, scale, tolerance: [
        opo(r, length, tolerance=tolerance) for r, length in zip(rewards, lengths, strict=True)
    ],
}
"""By name, from rewards, lengths, ``algo.scale_rewards`` and ``filter.tolerance``; gdpo needs each function's scores."""
