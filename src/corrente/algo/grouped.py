"""Algorithms without a critic (GRPO and its kin): from scored groups to training rows. numpy only.

What is left out of ``rows``, and why the gradient does not change:
- episodes without a reward (nor step scores that are asked for), completions withheld by ``algo.mask_truncated``, tokens older
  than ``oldest_trainable``: they are not trained on, by definition; what reward they have stays in the baseline of their group.
- rows whose advantage is exactly 0 at every token, where nothing but the advantage has a gradient: not with a teacher, a KL, an
  entropy bonus, an objective that trains tokens without advantage, or anything that is averaged over what is trained; nor with
  ``filter.zero_variance = "keep"``.

``Batch.sequences`` and ``Batch.tokens``, the fixed denominators, count every surviving episode and all it sampled, also what is
left out: withholding a token lowers the weight of the step, it does not raise that of the other tokens.

It does not decide what becomes of a group that teaches nothing; it gives the reason, the pipeline drops or replaces.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

import numpy as np
from numpy.typing import NDArray

from corrente.algo import agents, credit, filters, gdpo, graph, shaping
from corrente.algo.advantages import as_rewards, is_flat
from corrente.algo.estimators import ESTIMATORS
from corrente.algo.traits import TRAITS
from corrente.config import Reward, RunConfig
from corrente.config.rewards import Teaching
from corrente.data.types import Batch, Episode, Floats, Group, Row
from corrente.errors import AlignmentError

WITHOUT_GROUP = ("reinforce_pp",)
"""Estimators that compare an episode with the whole step: a group of one, or of equal rewards, teaches as any other."""


class GroupedAlgorithm:
    """Implements ``algo.base.Algorithm``."""

    def __init__(self, config: RunConfig) -> None:
        algo = config.algo
        self._algo = algo
        self._filter = config.filter
        self._reward = config.reward
        self._longest = config.sampling.max_tokens
        self._stands_alone = algo.advantage in WITHOUT_GROUP
        self._distills = config.distill.loss != "none"
        self._rewarded = not self._distills or config.distill.reward_weight > 0
        trait = TRAITS[algo.loss]
        self._keep_zero = (
            algo.beta > 0
            or algo.entropy_coef > 0
            or algo.top_entropy_quantile < 1
            or algo.denominator == "effective"
            or trait.effective
            or trait.trains_zero_advantage
            or config.staleness.normalise
            or config.filter.zero_variance == "keep"
        )

    def trainable(self, group: Group) -> str:
        """Why this group cannot be learned from; "" when it can.

        Equal rewards are a reason only with ``filter.zero_variance = "replace"``: otherwise such a group is part of its step. Of
        several agents it is enough that one can learn. Whom a teacher taught learns whatever the rewards are.
        """
        survivors = _survivors(group)
        taught = any(map(self._taught, survivors))
        if survivors and not taught and not self._rewarded:
            return "no teacher said anything"
        least = 1 if self._stands_alone or taught else 2
        parts = [[agents.part(e, agent) for e in survivors] for agent in agents.names(survivors)] or [survivors]
        known = max(sum(map(self._earned, part)) for part in parts)
        if len(survivors) < least:
            return "one survivor" if survivors else "no survivor"
        if known < least:
            return "one reward" if known else "no reward"
        if not any(self._trained(episode) and episode.sampled_tokens for part in parts for episode in part):
            return "nothing sampled that may be trained on"
        if unwanted := filters.reason(survivors, self._filter):
            return unwanted
        alone = self._stands_alone or taught
        if self._filter.zero_variance == "replace" and not alone and all(map(self._flat, parts)):
            return "all rewards equal"
        return ""

    def batch(
        self, groups: Sequence[Group], *, step: int, version: int, oldest_trainable: Sequence[int | None]
    ) -> Batch:
        """Rows of one optimizer step. Raises AlignmentError where what describes the same tokens does not line up."""
        rows: list[Row] = []
        sequences = tokens = 0
        survivors = [_survivors(group) for group in groups]
        for group, episodes, oldest, shares in zip(
            groups, survivors, oldest_trainable, self._shares(survivors), strict=True
        ):
            for episode, due in zip(episodes, shares, strict=True):
                sequences += max(1, len(due))
                tokens += episode.sampled_tokens
                taught = {a: due_T for a, due_T in due.items() if self._trained(agents.part(episode, a))}
                seen, advantages_T = agents.only(episode, tuple(taught)), agents.joined(episode, taught)
                rows += [
                    row
                    for row in graph.rows(group.id, seen, advantages_T=advantages_T, oldest=oldest)
                    if row.loss_mask.any()
                    and (self._keep_zero or row.advantages.any() or (self._distills and row.teachers))
                ]
        return Batch(step=step, version=version, rows=tuple(rows), sequences=sequences, tokens=tokens)

    def advantages(self, groups: Sequence[Sequence[Episode]]) -> list[list[NDArray[np.float64]]]:
        """Per group of a step and episode of it, the advantage of each sampled token (T,), from the rewards of them all."""
        return [
            [agents.joined(episode, due) for episode, due in zip(episodes, shares, strict=True)]
            for episodes, shares in zip(groups, self._shares(groups), strict=True)
        ]

    def _shares(self, groups: Sequence[Sequence[Episode]]) -> list[list[dict[str, NDArray[np.float64]]]]:
        """Per group and episode, what each of its agents is due; agents of one name are compared with one another."""
        out: list[list[dict[str, NDArray[np.float64]]]] = [[{} for _ in episodes] for episodes in groups]
        for agent in agents.names(episode for episodes in groups for episode in episodes):
            parts = [[agents.part(episode, agent) for episode in episodes] for episodes in groups]
            for mine, outcome_G, shares in zip(parts, self._outcomes(parts), out, strict=True):
                for episode, due_T, share in zip(mine, self._credited(mine, outcome_G), shares, strict=True):
                    if episode.completions:
                        share[agent] = due_T
        return out

    def _outcomes(self, groups: Sequence[Sequence[Episode]]) -> list[Floats]:
        tolerance = self._filter.tolerance
        if self._algo.advantage == "gdpo":
            names = gdpo.names_of(groups)
            scores = [gdpo.table(episodes, names) for episodes in groups]
            given = {name for episodes in groups for episode in episodes for name in episode.env_rewards}
            return gdpo.gdpo(scores, weights=_weights(self._reward, names, given), tolerance=tolerance)
        rewards = [self._rewards(episodes) for episodes in groups]
        lengths = [_lengths(episodes) for episodes in groups]
        return ESTIMATORS[self._algo.advantage](rewards, lengths, self._algo.scale_rewards, tolerance)

    def _credited(self, episodes: Sequence[Episode], outcome_G: Floats) -> list[NDArray[np.float64]]:
        spread = credit.spread_out(episodes, outcome_G)
        if self._algo.credit == "outcome":
            return spread
        scale = self._algo.scale_rewards != "none"
        own = credit.CREDITS[self._algo.credit](episodes, scale=scale, tolerance=self._filter.tolerance)
        return [a + b for a, b in zip(spread, own, strict=True)]

    def _rewards(self, episodes: Sequence[Episode]) -> NDArray[np.float64]:
        rewards_G = as_rewards([episode.reward for episode in episodes])
        return shaping.shaped(rewards_G, _lengths(episodes), algo=self._algo, longest=self._longest)

    def _flat(self, episodes: Sequence[Episode]) -> bool:
        tolerance = self._filter.tolerance
        if self._algo.credit != "outcome":
            own = credit.CREDITS[self._algo.credit](episodes, scale=False, tolerance=tolerance)
            if any(values_T.any() for values_T in own):
                return False
        if self._algo.advantage == "gdpo":
            return gdpo.flat(gdpo.table(episodes, gdpo.names_of([episodes])), tolerance=tolerance)
        return is_flat(self._rewards(episodes), tolerance=tolerance)

    def _taught(self, episode: Episode) -> bool:
        return self._distills and bool(episode.taught)

    def _earned(self, episode: Episode) -> bool:
        of_steps = self._algo.credit != "outcome" and bool(episode.step_scores)
        return episode.reward is not None or of_steps or self._taught(episode)

    def _trained(self, episode: Episode) -> bool:
        return self._earned(episode) and not (self._algo.mask_truncated and episode.truncated)


def _weights(reward: Reward, names: Sequence[str], given: Container[str]) -> list[float]:
    """Of the scores ``names``. Those of an environment (``given``) weigh 1; the others are in the config's order, and weigh what
    it says. A teacher's is always None and weighs nothing."""
    ours = [name for name in names if name not in given]
    scorers = [0.0 if isinstance(scorer, Teaching) else scorer.weight for scorer in reward.scorers]
    weights = [*(reward.weights or (1.0,) * (len(ours) - len(scorers))), *scorers]
    if len(weights) != len(ours):
        raise AlignmentError(f"scores of {', '.join(ours)} for {len(weights)} rewards that have a weight")
    weighed = dict(zip(ours, weights, strict=True))
    return [weighed.get(name, 1.0) for name in names]


def _survivors(group: Group) -> tuple[Episode, ...]:
    return tuple(episode for episode in group.episodes if episode.status == "ok")


def _lengths(episodes: Sequence[Episode]) -> NDArray[np.int64]:
    return np.array([episode.sampled_tokens for episode in episodes], np.int64)
