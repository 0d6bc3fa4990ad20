"""The numbers of one optimizer step that come from groups: rewards, lengths, lags."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from corrente.data.age import split_by_lag
from corrente.data.types import Batch, Group


class ScoreStats:
    """Means over all episodes scored since the report before, those of filtered groups included: what the policy earns, not
    what the filter left. A reward function that does not apply to an episode is left out of its own mean. Of several agents
    each has a mean of its own; so has every number that environments and tools give.

    Of a group only its numbers are kept: a step may wait for many that are filtered.
    """

    def __init__(self) -> None:
        self._rewards: list[float] = []
        self._equal: list[bool] = []
        self._tokens: list[int] = []
        self._terminated: list[int] = []
        self._scores = defaultdict[str, list[float]](list)
        self._agents = defaultdict[str, list[float]](list)
        self._metrics = defaultdict[str, float](float)

    def add(self, group: Group) -> None:
        if group.episodes:
            self._equal.append(len({e.reward for e in group.episodes}) < 2)
        for episode in group.episodes:
            if episode.reward is not None:
                self._rewards.append(episode.reward)
            self._tokens.append(episode.sampled_tokens)
            if not episode.truncated:
                self._terminated.append(episode.sampled_tokens)
            for name, score in episode.scores.items():
                if score is not None:
                    self._scores[name].append(score)
            for name, earned in episode.agent_rewards.items():
                self._agents[name].append(earned)
            for name, value in episode.metrics.items():
                self._metrics[name] += value

    def metrics(self) -> dict[str, float]:
        out = {"samples/scored": float(len(self._tokens))}
        if self._rewards:
            out["reward/mean"] = float(np.mean(self._rewards))
            out["reward/std"] = deviation(self._rewards)
            out["reward/zero_std_fraction"] = float(np.mean(self._equal))
        for name, scores in sorted(self._scores.items()):
            out[f"reward/{name}"] = float(np.mean(scores))
            out[f"reward_std/{name}"] = deviation(scores)
        out |= {f"reward/agent/{name}": float(np.mean(earned)) for name, earned in sorted(self._agents.items())}
        if self._tokens:
            out |= _spread("completion/tokens", self._tokens)
            out["completion/truncated_fraction"] = 1.0 - len(self._terminated) / len(self._tokens)
            out |= _spread("completion/terminated_tokens", self._terminated)
            out |= {name: total / len(self._tokens) for name, total in sorted(self._metrics.items())}
        return out


def _spread(name: str, values: Sequence[int]) -> dict[str, float]:
    """Mean, least and greatest; nothing of nothing."""
    if not values:
        return {}
    return {
        f"{name}_mean": float(np.mean(values)),
        f"{name}_min": float(min(values)),
        f"{name}_max": float(max(values)),
    }


def trained_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """The metrics of the groups that entered one optimizer step."""
    episodes = [e for g in groups for e in g.episodes]
    rewards = [e.reward for e in episodes if e.reward is not None]
    out = {"samples/trained": float(len(episodes)), "samples/tokens": float(sum(e.sampled_tokens for e in episodes))}
    return {**out, "reward/trained_mean": float(np.mean(rewards))} if rewards else out


def lag_metrics(batch: Batch, groups: Sequence[Group], oldest: Sequence[int | None]) -> dict[str, float]:
    """Lag in versions of the step's trained tokens, queueing included; of all its groups where no row is trained. With a mask by
    age, ``oldest`` trainable version per group, also which part of what was sampled it withheld."""
    lags = batch.lags()
    if not len(lags):
        lags = np.array([batch.version - g.oldest_version for g in groups], np.int32)
    of_lags = {"lag/mean": float(lags.mean()), "lag/max": float(lags.max())} if len(lags) else {}
    return of_lags | _withheld(groups, oldest, version=batch.version)


def _withheld(groups: Sequence[Group], oldest: Sequence[int | None], *, version: int) -> dict[str, float]:
    """The part of all sampled tokens, and of those of each lag bucket, that is too old to be trained on."""
    if all(limit is None for limit in oldest):
        return {}
    spans = [
        (version - span.version, span.stop - span.start, limit is not None and span.version < limit)
        for group, limit in zip(groups, oldest, strict=True)
        for episode in group.episodes
        for completion in episode.completions
        for span in completion.spans
    ]
    if not spans:
        return {}
    lags, tokens, old = (np.array(column) for column in zip(*spans, strict=True))
    out = {"lag/withheld_fraction": float(tokens[old].sum() / tokens.sum())}
    for name, mine in split_by_lag(lags):
        out[f"lag{name}/withheld_fraction"] = float(tokens[mine & old].sum() / tokens[mine].sum())
    return out


def deviation(values: Sequence[float] | NDArray[Any]) -> float:
    """Standard deviation of a sample, as in TRL's logs; 0 of one value."""
    return float(np.std(values, ddof=1)) if len(values) > 1 else 0.0


def sample_records(groups: Sequence[Group], *, count: int, version: int) -> list[dict[str, object]]:
    """The first ``count`` episodes of a step as plain data, to be read by a person."""
    episodes = [(group, episode) for group in groups for episode in group.episodes]
    return [
        {
            "prompt_id": episode.prompt_id,
            "group": group.id,
            "prompt": episode.opening or group.prompt.text,
            "completion": episode.text,
            **({"messages": list(episode.messages)} if episode.messages else {}),
            "reward": episode.reward,
            "scores": episode.scores,
            "extra": episode.extra,
            "tokens": episode.sampled_tokens,
            "finish_reason": episode.completions[-1].finish_reason if episode.completions else "",
            "versions": sorted(set(episode.sampled_versions())),
            "trained_at_version": version,
            "fields": group.prompt.fields,
        }
        for group, episode in episodes[:count]
    ]
