"""The numbers of an evaluation: held-out reward, pass@k, and how far to trust them; in all, and for each source of a mixture.

    eval/reward           mean over prompts of the mean over their samples
    eval/reward_std       over all samples
    eval/reward_stderr    of eval/reward, with prompts as what was drawn: samples of one prompt are not independent
    eval/pass@k           probability that at least one of k samples of a prompt passes
    eval/reward/<name>    mean of one reward function, of what it applies to
    eval/agent/<name>     mean reward of one of several agents
    eval/<source>/...     the same of the prompts of one source, where there are several

A sample that failed is in none of the means and is counted in ``eval/failed``. A prompt with fewer than k samples left is not in
pass@k. Numbers of nothing are left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from corrente.controller.step_metrics import deviation
from corrente.data.types import Episode, Group


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """1 - C(n - c, k) / C(n, k) for n samples of which c passed, k <= n: without bias, whatever n is (Chen et al. 2021,
    arXiv:2107.03374, equation 1)."""
    if not 0 <= passed <= samples or not 1 <= k <= samples:
        raise ValueError(f"pass@{k} of {samples} samples of which {passed} passed")
    return 1.0 - math.comb(samples - passed, k) / math.comb(samples, k)


def source_of(prompt_id: str) -> str:
    """Which source of a mixture, or which of several datasets, a prompt is from; empty where there is one."""
    name, colon, _ = prompt_id.partition(":")
    return name if colon else ""


def eval_metrics(
    groups: Sequence[Group], *, pass_at: Sequence[int] = (1,), pass_reward: float = 1.0
) -> dict[str, float]:
    """``groups``: one per prompt, with all its samples, failed ones included. See the table above."""
    episodes = [e for group in groups for e in group.episodes]
    judged = [e for e in episodes if _counts(e)]
    out = {"eval/episodes": float(len(judged)), "eval/failed": float(len(episodes) - len(judged))}
    out |= _means("eval", groups, pass_at=pass_at, pass_reward=pass_reward)
    sources = sorted({source_of(group.prompt.id) for group in groups})
    if len(sources) > 1:
        for name in sources:
            part = [group for group in groups if source_of(group.prompt.id) == name]
            out |= _means(f"eval/{name or 'unnamed'}", part, pass_at=pass_at, pass_reward=pass_reward)
    if versions := [v for e in judged for v in e.sampled_versions()]:
        out["eval/version"] = float(min(versions))
        out["eval/version_max"] = float(max(versions))
    return out


def rewards_of(group: Group) -> list[float]:
    """The rewards of the samples that did not fail and have one."""
    return [e.reward for e in group.episodes if e.status == "ok" and e.reward is not None]


def _means(area: str, groups: Sequence[Group], *, pass_at: Sequence[int], pass_reward: float) -> dict[str, float]:
    judged = [e for group in groups for e in group.episodes if _counts(e)]
    if not judged:
        return {}
    return {
        **_of_rewards(area, groups, pass_at=pass_at, pass_reward=pass_reward),
        f"{area}/tokens_mean": float(np.mean([e.sampled_tokens for e in judged])),
        f"{area}/truncated_fraction": float(np.mean([e.truncated for e in judged])),
        **_by_function(area, judged),
        **_by_agent(area, judged),
    }


def _of_rewards(area: str, groups: Sequence[Group], *, pass_at: Sequence[int], pass_reward: float) -> dict[str, float]:
    of_prompt = [rewards for group in groups if (rewards := rewards_of(group))]
    if not of_prompt:
        return {}
    means = np.array([np.mean(rewards) for rewards in of_prompt])
    out = {f"{area}/reward": float(means.mean()), f"{area}/reward_std": deviation(np.concatenate(of_prompt))}
    if len(means) > 1:
        out[f"{area}/reward_stderr"] = float(means.std(ddof=1) / math.sqrt(len(means)))
    for k in pass_at:
        enough = [rewards for rewards in of_prompt if len(rewards) >= k]
        if enough:
            passed = [sum(reward >= pass_reward for reward in rewards) for rewards in enough]
            each = [pass_at_k(len(rewards), c, k) for rewards, c in zip(enough, passed, strict=True)]
            out[f"{area}/pass@{k}"] = float(np.mean(each))
    return out


def _by_function(area: str, judged: Sequence[Episode]) -> dict[str, float]:
    """Each reward function's own mean, of what it applies to."""
    names = sorted({name for e in judged for name in e.scores})
    scores = {name: [s for e in judged if (s := e.scores.get(name)) is not None] for name in names}
    return {f"{area}/reward/{name}": float(np.mean(given)) for name, given in scores.items() if given}


def _by_agent(area: str, judged: Sequence[Episode]) -> dict[str, float]:
    """The mean reward of each of several agents, over the episodes in which it has one."""
    earned: dict[str, list[float]] = {}
    for episode in judged:
        for name, reward in episode.agent_rewards.items():
            earned.setdefault(name, []).append(reward)
    return {f"{area}/agent/{name}": float(np.mean(earned[name])) for name in sorted(earned)}


def _counts(episode: Episode) -> bool:
    """True when the episode was judged: as a whole, or one of several agents in it."""
    return episode.status == "ok" and (episode.reward is not None or bool(episode.agent_rewards))
