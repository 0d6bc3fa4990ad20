"""The inputs and the result of an advantage estimator, and what several of them share. numpy, float64 inside.

    estimator(step, *, its keys) -> an array (G,) per group: the advantage of each episode

An estimator is a pure function of a step; kinds.py lists the built-in ones, one file each. Shapes: N groups of a step, G
episodes of a group (G may differ), S scores an episode's reward is made of.

Every estimator keeps to this: an episode without a reward (NaN) is left out of every mean, and its advantage is 0. Nothing to
compare with gives zeros, never NaN: fewer than two rewards, or rewards that differ by no more than ``tolerance`` (float
noise must not be divided by its own standard deviation and come out full size).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from corrente.data.types import Floats
from corrente.errors import AlignmentError, PipelineError

STD_EPS = 1e-4
"""Added to the standard deviation, as TRL does: rewards 1e-4 apart are damped instead of blown up."""

Rewards = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRewards:
    """The rewards of a step's episodes, group by group.

    ``rewards``: per group (G,), NaN where an episode has none; length shaping is part of them. ``lengths``: per group (G,),
    sampled tokens. ``scores``: per group (G, S), what each function, model or environment gave, NaN where it did not apply;
    ``weights`` (S,): what each counts in the reward. Both are empty for a built-in estimator that reads rewards alone.
    ``tolerance``: rewards that differ by no more are equal (``filter.tolerance``).
    """

    rewards: Sequence[Rewards]
    lengths: Sequence[NDArray[np.int64]]
    tolerance: float
    scores: Sequence[NDArray[np.float64]] = ()
    weights: Sequence[float] = ()


Estimator = Callable[..., Sequence[NDArray[Any]]]


def as_rewards(rewards: Sequence[float | None]) -> Rewards:
    """Rewards (G,) as an array, None as NaN."""
    return np.array([np.nan if reward is None else reward for reward in rewards], np.float64)


def is_flat(rewards_G: Rewards, *, tolerance: float) -> bool:
    """True where these rewards carry no signal: fewer than two, or all within ``tolerance`` of one another."""
    known = rewards_G[~np.isnan(rewards_G)]
    return len(known) < 2 or bool(np.ptp(known) <= tolerance)


def spread(values: Sequence[NDArray[np.float64]]) -> float:
    """Sample standard deviation of all values of several groups together, NaN left out; 0 of fewer than two."""
    known = np.concatenate([v[~np.isnan(v)] for v in values]) if values else np.empty(0)
    return float(np.std(known, ddof=1)) if len(known) > 1 else 0.0


def centred(rewards_G: Rewards, *, tolerance: float) -> Floats:
    """r_i - mean(r) of one group; zeros where it is flat."""
    if is_flat(rewards_G, tolerance=tolerance):
        return np.zeros(len(rewards_G), np.float32)
    return np.nan_to_num(rewards_G - np.nanmean(rewards_G), nan=0.0).astype(np.float32)


def as_advantages(values: Any, step: StepRewards) -> list[Floats]:
    """The result of an estimator, as an array (G,) per group. Raises AlignmentError where it does not line up with the
    groups, and PipelineError where an advantage is not a finite number."""
    try:
        arrays = [np.asarray(value, np.float32) for value in values]
    except (TypeError, ValueError) as error:
        raise AlignmentError(f"algo.advantage: it must return a list with an array (G,) per group: {error}") from error
    shapes, wanted = [array.shape for array in arrays], [rewards_G.shape for rewards_G in step.rewards]
    if shapes != wanted:
        raise AlignmentError(f"algo.advantage: it returned arrays of shapes {shapes} for groups of shapes {wanted}")
    if not all(np.isfinite(array).all() for array in arrays):
        raise PipelineError(
            "algo.advantage: it gave an advantage that is not a finite number; an episode without a reward gets 0"
        )
    return arrays
