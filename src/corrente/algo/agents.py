"""Several agents in one episode: each is compared with those of its name in the other episodes of the group.

An agent is a speaker of sampled turns. It earned what was given to it alone (``Episode.agent_rewards``) and what was given to the
whole episode. Where roles differ, so do their chances: the first to move in a game wins more often, and a baseline over both
would reward the role and not the play. A baseline per role is the idea of role-conditioned advantage estimation (Liu et al. 2025,
arXiv:2506.24119), there a moving average, here whatever ``algo.advantage`` makes of the group.

The turns and rewards of one agent are an episode too (``part``), so lengths, estimators, shaping and credit need to know
nothing of agents. With one agent the part is the episode itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from corrente.data.types import Episode

Shares = Mapping[str, NDArray[np.float64]]
"""By agent, the advantage of each token it sampled (T,), turn after turn."""

OWN = "its own"


def names(episodes: Iterable[Episode]) -> tuple[str, ...]:
    """The speakers whose turns were sampled, in order of appearance."""
    return tuple(dict.fromkeys(turn.speaker for e in episodes for turn in e.turns if turn.completion is not None))


def part(episode: Episode, agent: str) -> Episode:
    """The episode with the turns, the scores and the reward of ``agent`` alone. A reward given to it alone is one more of the
    environment's scores, called ``OWN``.

    Its turns are a list and no longer a graph: what is computed from a part depends on the tokens that were sampled, not on those
    that were read.
    """
    mine = [at for at, turn in enumerate(episode.turns) if turn.speaker == agent and turn.completion is not None]
    if len(mine) == sum(turn.completion is not None for turn in episode.turns) and not episode.agent_rewards:
        return episode
    place = {turn: at for at, turn in enumerate(mine)}
    own = {OWN: episode.agent_rewards[agent]} if agent in episode.agent_rewards else {}
    return msgspec.structs.replace(
        episode,
        turns=tuple(msgspec.structs.replace(episode.turns[at], parent=None) for at in mine),
        reward=_earned(episode, agent) if mine else None,
        scores={**episode.scores, **own} if mine else {},
        env_rewards={**episode.env_rewards, **own} if mine else {},
        step_scores=tuple(
            msgspec.structs.replace(step, turn=place[step.turn]) for step in episode.step_scores if step.turn in place
        ),
    )


def _earned(episode: Episode, agent: str) -> float | None:
    own = episode.agent_rewards.get(agent)
    return episode.reward if own is None else own + (episode.reward or 0.0)


def joined(episode: Episode, shares: Shares) -> NDArray[np.float64]:
    """The advantages of the agents of ``shares``, in the order in which their tokens were sampled (T,)."""
    left = dict(shares)
    out: list[NDArray[np.float64]] = []
    for turn in episode.turns:
        if turn.completion is not None and turn.speaker in left:
            count = len(turn.completion.tokens)
            out.append(left[turn.speaker][:count])
            left[turn.speaker] = left[turn.speaker][count:]
    return np.concatenate(out) if out else np.empty(0)


def only(episode: Episode, agents: Sequence[str]) -> Episode:
    """The episode with the turns of all others as given ones: context that is not trained on."""
    if all(turn.completion is None or turn.speaker in agents for turn in episode.turns):
        return episode
    return msgspec.structs.replace(
        episode,
        turns=tuple(
            turn if turn.speaker in agents else msgspec.structs.replace(turn, completion=None) for turn in episode.turns
        ),
    )
