"""The numbers of one optimizer step that come from groups: rewards, lengths, lags."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from corrente.types import Batch, Episode, Group


def scored_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Means over all episodes scored since the report before, those of filtered groups included: what the policy earns, not
    what the filter left. A reward function that does not apply to an episode is left out of its own mean."""
    episodes = [e for g in groups for e in g.episodes]
    out: dict[str, float] = {"samples/scored": float(len(episodes))}
    rewards = [e.reward for e in episodes if e.reward is not None]
    if rewards:
        out["reward/mean"] = float(np.mean(rewards))
        out["reward/std"] = float(np.std(rewards))
    for name in sorted({name for e in episodes for name in e.scores}):
        scores = [s for e in episodes if (s := e.scores.get(name)) is not None]
        if scores:
            out[f"reward/{name}"] = float(np.mean(scores))
    if episodes:
        lengths = [e.sampled_tokens for e in episodes]
        out["completion/tokens_mean"] = float(np.mean(lengths))
        out["completion/tokens_max"] = float(max(lengths))
        out["completion/truncated_fraction"] = float(np.mean([e.truncated for e in episodes]))
    return out


def trained_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """What entered one optimizer step."""
    episodes = [e for g in groups for e in g.episodes]
    rewards = [e.reward for e in episodes if e.reward is not None]
    out = {"samples/trained": float(len(episodes)), "samples/tokens": float(sum(e.sampled_tokens for e in episodes))}
    return {**out, "reward/trained_mean": float(np.mean(rewards))} if rewards else out


def lag_metrics(batch: Batch, groups: Sequence[Group]) -> dict[str, float]:
    """Lag in versions of the step's sampled tokens, queueing included; of all its groups where no row is trained."""
    lags = batch.lags()
    if not len(lags):
        lags = np.array([batch.version - g.oldest_version for g in groups], np.int32)
    return {"lag/mean": float(lags.mean()), "lag/max": float(lags.max())} if len(lags) else {}


def eval_metrics(episodes: Sequence[Episode]) -> Mapping[str, float]:
    """Held-out reward, the versions that really sampled it, and how many prompts failed (they score nothing, and are named)."""
    ok = [e for e in episodes if e.status == "ok" and e.reward is not None]
    versions = [v for e in ok for v in e.span_versions()]
    out = {"eval/failed": float(len(episodes) - len(ok)), "eval/episodes": float(len(ok))}
    if ok:
        out["eval/reward"] = float(np.mean([e.reward or 0.0 for e in ok]))
        out["eval/tokens_mean"] = float(np.mean([e.sampled_tokens for e in ok]))
    if versions:
        out["eval/version"] = float(min(versions))
        out["eval/version_max"] = float(max(versions))
    return out


def sample_records(groups: Sequence[Group], *, count: int, version: int) -> list[dict[str, object]]:
    """The first ``count`` episodes of a step as plain data, to be read by a person."""
    episodes = [(group, episode) for group in groups for episode in group.episodes]
    return [
        {
            "prompt_id": episode.prompt_id,
            "group": group.id,
            "prompt": group.prompt.text,
            "completion": episode.text,
            "reward": episode.reward,
            "scores": episode.scores,
            "tokens": episode.sampled_tokens,
            "finish_reason": episode.completions[-1].finish_reason if episode.completions else "",
            "versions": sorted(set(episode.span_versions())),
            "trained_at_version": version,
            "fields": group.prompt.fields,
        }
        for group, episode in episodes[:count]
    ]
