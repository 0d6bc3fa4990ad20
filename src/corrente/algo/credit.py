"""Credit for what was earned on the way: advantages token by token, from the scores of steps. numpy, float64 inside.

    step   s~ = (s - mean) / (std + 1e-4)     over all steps of the group; A_t = A + sum of s~ over steps that end after t
           Process supervision: Shao et al. 2024, arXiv:2402.03300, section 4.1.3. A step is credited to all that led to it.
    turn   s~ = s - mean of the other episodes' scores of the same turn, A_t = A + s~ of its own turn
           Turn-level credit: Zeng et al. 2025, arXiv:2505.11821. Scores of the steps of a turn add up; a turn that no other
           episode reached has no baseline and gets 0.

A: the advantage of the outcome (kinds.py), 0 where an episode has no reward. Shapes: one array (T,) per episode, over its
sampled tokens, turn after turn. With grpo's ``scale_rewards`` none steps are not divided by std. Degenerate cases: flat scores,
or fewer than two, add 0; an episode without steps keeps A alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from corrente.algo.advantages import centred
from corrente.algo.grpo import normalised
from corrente.algo.rloo import leave_one_out
from corrente.config import Algo
from corrente.data.types import Episode, Floats, StepScore


def places(episode: Episode) -> dict[int, int]:
    """Turn -> index of its first token among the episode's sampled tokens."""
    out, at = {}, 0
    for turn, spoken in enumerate(episode.turns):
        if spoken.completion is not None:
            out[turn] = at
            at += len(spoken.completion.tokens)
    return out


def by_step(episodes: Sequence[Episode], *, scale: bool, tolerance: float) -> list[NDArray[np.float64]]:
    """Per episode (T,): the scaled scores of the steps that end after each token, summed."""
    scores = np.array([step.score for episode in episodes for step in episode.step_scores], np.float64)
    scaled = iter((normalised if scale else centred)(scores, tolerance=tolerance).tolist())
    out = []
    for episode in episodes:
        first, earned_T = places(episode), np.zeros(episode.sampled_tokens)
        for step in episode.step_scores:
            earned_T[: first[step.turn] + step.stop] += next(scaled)
        out.append(earned_T)
    return out


def by_turn(episodes: Sequence[Episode], *, scale: bool, tolerance: float) -> list[NDArray[np.float64]]:
    """Per episode (T,): what each turn earned beyond the same turn of the others. ``scale`` does not matter."""
    out = [np.zeros(episode.sampled_tokens) for episode in episodes]
    starts = [places(episode) for episode in episodes]
    for turn in sorted({turn for start in starts for turn in start}):
        scores_G = np.array([_of_turn(episode.step_scores, turn) for episode in episodes])
        for g, share in enumerate(leave_one_out(scores_G, tolerance=tolerance)):
            spoken = episodes[g].turns[turn].completion if turn in starts[g] else None
            if spoken is not None:
                at = starts[g][turn]
                out[g][at : at + len(spoken.tokens)] += share
    return out


def _of_turn(steps: Sequence[StepScore], turn: int) -> float:
    mine = [step.score for step in steps if step.turn == turn]
    return sum(mine) if mine else np.nan


def is_scaled(algo: Algo) -> bool:
    """True where scores of steps are divided by their standard deviation: unless grpo is told not to divide."""
    return getattr(algo.advantage, "scale_rewards", "group") != "none"


CREDITS: Mapping[str, Callable[..., list[NDArray[np.float64]]]] = {"step": by_step, "turn": by_turn}


def spread_out(episodes: Sequence[Episode], advantages_G: Floats) -> list[NDArray[np.float64]]:
    """Per episode (T,): its advantage at every sampled token."""
    return [np.full(e.sampled_tokens, float(a)) for e, a in zip(episodes, advantages_G, strict=True)]
