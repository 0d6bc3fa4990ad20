"""Group-relative algorithms (GRPO, Dr. GRPO, DAPO, RLOO): from scored groups to training rows. numpy only.

What is left out of ``rows``, and why the gradient does not change:
- episodes without a reward, completions withheld by ``algo.mask_truncated``, tokens older than ``oldest_trainable``: they are
  not trained on, by definition; what reward they have stays in the baseline of their group.
- rows whose advantage is exactly 0: the objective's gradient is 0 there. Not left out with ``algo.beta`` > 0 (the KL term
  has a gradient) nor with ``filter.zero_variance = "keep"``.

``Batch.sequences`` and ``Batch.tokens``, the denominators, count every surviving episode and all it sampled, also what is
left out: withholding a token lowers the weight of the step, it does not raise that of the other tokens.

It does not decide what becomes of a group that teaches nothing; it gives the reason, the pipeline drops or replaces.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from corrente.algo.advantages import as_rewards, grpo, is_flat, rloo
from corrente.config import RunConfig
from corrente.errors import AlignmentError
from corrente.types import Batch, Completion, Episode, Floats, Group, Row, concat_tokens


class GroupedAlgorithm:
    """Implements ``algo.base.Algorithm``."""

    def __init__(self, config: RunConfig) -> None:
        self._algo = config.algo
        self._filter = config.filter
        self._keep_zero = config.algo.beta > 0 or config.filter.zero_variance == "keep"

    def trainable(self, group: Group) -> str:
        """Why this group cannot be learned from; "" when it can.

        Equal rewards are a reason only with ``filter.zero_variance = "replace"``: otherwise such a group is part of its step.
        """
        survivors = _survivors(group)
        rewards_G = as_rewards([episode.reward for episode in survivors])
        known = int(np.count_nonzero(~np.isnan(rewards_G)))
        if len(survivors) < 2:
            return "one survivor" if survivors else "no survivor"
        if known < 2:
            return "one reward" if known else "no reward"
        if not any(self._trained(episode) and episode.sampled_tokens for episode in survivors):
            return "nothing sampled that may be trained on"
        if self._filter.zero_variance == "replace" and is_flat(rewards_G, tolerance=self._filter.tolerance):
            return "all rewards equal"
        return ""

    def batch(
        self, groups: Sequence[Group], *, step: int, version: int, oldest_trainable: Sequence[int | None]
    ) -> Batch:
        """Rows of one optimizer step. Raises AlignmentError when a conversation is not a single path of turns."""
        rows: list[Row] = []
        sequences = tokens = 0
        for group, oldest in zip(groups, oldest_trainable, strict=True):
            survivors = _survivors(group)
            advantages_G = self.advantages(survivors)
            for episode, advantage in zip(survivors, advantages_G, strict=True):
                sequences += 1
                tokens += episode.sampled_tokens
                if self._trained(episode) and (advantage != 0 or self._keep_zero):
                    row = _row(group.id, episode, advantage=float(advantage), oldest=oldest)
                    rows.extend([row] if row.loss_mask.any() else [])
        return Batch(step=step, version=version, rows=tuple(rows), sequences=sequences, tokens=tokens)

    def advantages(self, episodes: Sequence[Episode]) -> Floats:
        """Advantage of each episode of one group (G,), from the rewards of them all."""
        rewards_G = as_rewards([episode.reward for episode in episodes])
        if self._algo.advantage == "rloo":
            return rloo(rewards_G, tolerance=self._filter.tolerance)
        return grpo(rewards_G, scale=self._algo.scale_rewards == "group", tolerance=self._filter.tolerance)

    def _trained(self, episode: Episode) -> bool:
        return episode.reward is not None and not (self._algo.mask_truncated and episode.truncated)


def _survivors(group: Group) -> tuple[Episode, ...]:
    return tuple(episode for episode in group.episodes if episode.status == "ok")


def _row(group: int, episode: Episode, *, advantage: float, oldest: int | None) -> Row:
    """The conversation as one sequence; sampled tokens not older than ``oldest`` are trained on."""
    for at, turn in enumerate(episode.turns):
        if turn.parent not in (None, at - 1):
            raise AlignmentError(f"turn {at} of episode {episode.index} of {episode.prompt_id} follows {turn.parent}")
    tokens = concat_tokens([turn.tokens for turn in episode.turns])
    mask, logprobs = np.zeros(len(tokens), np.bool_), np.zeros(len(tokens), np.float32)
    versions = np.zeros(len(tokens), np.int32)
    at = 0
    for turn in episode.turns:
        here = slice(at, at + len(turn.tokens))
        at = here.stop
        if turn.completion is not None:
            _check_same_tokens(turn.completion, tokens[here], episode)
            versions[here] = turn.completion.versions
            logprobs[here] = turn.completion.logprobs
            mask[here] = True
    if oldest is not None:
        mask &= versions >= oldest
    return Row(
        group=group,
        tokens=tokens,
        loss_mask=mask,
        logprobs=np.where(mask, logprobs, np.float32(0)),
        versions=np.where(mask, versions, np.int32(0)),
        advantages=np.where(mask, np.float32(advantage), np.float32(0)),
    )


def _check_same_tokens(completion: Completion, tokens: np.ndarray, episode: Episode) -> None:
    if not np.array_equal(completion.tokens, tokens):
        raise AlignmentError(
            f"a turn of episode {episode.index} of {episode.prompt_id} has tokens other than those its completion sampled"
        )
