"""The scores that the rewards of a step are made of, as tables, and what each counts. numpy only.

Shapes: G episodes of a group, S scores of the step. NaN: the score does not apply to the episode.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

import numpy as np
from numpy.typing import NDArray

from corrente.algo.advantages import is_flat
from corrente.config import Reward
from corrente.config.rewards import Teaching
from corrente.data.types import Episode
from corrente.errors import AlignmentError


def score_names(groups: Sequence[Sequence[Episode]]) -> tuple[str, ...]:
    """The names of a step's scores, in the order of the config, which is that of every episode's ``scores``."""
    return tuple(dict.fromkeys(name for group in groups for episode in group for name in episode.scores))


def score_table(episodes: Sequence[Episode], names: Sequence[str]) -> NDArray[np.float64]:
    """Scores (G, S) of a group."""
    rows = [[episode.scores.get(name) for name in names] for episode in episodes]
    return np.array([[np.nan if s is None else s for s in row] for row in rows], np.float64).reshape(
        len(rows), len(names)
    )


def score_weights(reward: Reward, names: Sequence[str], of_environment: Container[str]) -> list[float]:
    """The weight of each score in the reward (S,). Those of an environment count 1; the others are in the config's order,
    and count what it says. A teacher's is always None and counts nothing. Raises AlignmentError where names and weights do
    not line up."""
    ours = [name for name in names if name not in of_environment]
    if not ours:
        return [1.0 for _ in names]
    scorers = [0.0 if isinstance(scorer, Teaching) else scorer.weight for scorer in reward.scorers]
    weights = [*(reward.weights or (1.0,) * (len(ours) - len(scorers))), *scorers]
    if len(weights) != len(ours):
        raise AlignmentError(f"scores of {', '.join(ours)} for {len(weights)} rewards that have a weight")
    weighed = dict(zip(ours, weights, strict=True))
    return [weighed.get(name, 1.0) for name in names]


def no_score_differs(scores_GS: NDArray[np.float64], *, tolerance: float) -> bool:
    """True where no score tells the episodes of a group apart."""
    return all(is_flat(column_G, tolerance=tolerance) for column_G in scores_GS.T)
