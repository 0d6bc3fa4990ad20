"""Translate metric names to those of TRL, so that runs of both can be compared on one dashboard.

TRL logs "reward" and "eval_reward"; the trackers of transformers show them as "train/reward" and "eval/reward". A metric that TRL
does not have keeps its name, and metrics.jsonl always has our names. Only numbers with the same meaning share a name; where a
definition differs in a detail, the table in docs/how-to/trackers.md describes it.
"""

from __future__ import annotations

from collections.abc import Mapping

TRL_NAMES = {
    "train/lr": "train/learning_rate",
    "reward/mean": "train/reward",
    "reward/std": "train/reward_std",
    "reward/zero_std_fraction": "train/frac_reward_zero_std",
    "completion/tokens_mean": "train/completions/mean_length",
    "completion/tokens_min": "train/completions/min_length",
    "completion/tokens_max": "train/completions/max_length",
    "completion/truncated_fraction": "train/completions/clipped_ratio",
    "completion/terminated_tokens_mean": "train/completions/mean_terminated_length",
    "completion/terminated_tokens_min": "train/completions/min_terminated_length",
    "completion/terminated_tokens_max": "train/completions/max_terminated_length",
    "kl/reference": "train/kl",
    "train/clip_fraction": "train/clip_ratio/region_mean",
    "train/clip_fraction_low": "train/clip_ratio/low_mean",
    "train/clip_fraction_high": "train/clip_ratio/high_mean",
    "mismatch/logprob_gap_mean": "train/sampling/sampling_logp_difference/mean",
    "mismatch/logprob_gap_max": "train/sampling/sampling_logp_difference/max",
    "ratio/mean": "train/ratio",
    "lag/mean": "train/sample/staleness_mean",
    "lag/max": "train/sample/staleness_max",
    "time/step_s": "train/perf/step_s",
    "time/wait_groups_s": "train/perf/rollout_wait_s",
    "eval/tokens_mean": "eval/completions/mean_length",
    "eval/truncated_fraction": "eval/completions/clipped_ratio",
}
"""Our names to TRL's. train/loss, train/grad_norm, train/entropy, eval/reward and eval/reward_std are the same in both."""

TRL_PREFIXES = (
    ("reward/agent/", "reward/agent/", ""),
    ("reward_std/", "train/rewards/", "/std"),
    ("reward/", "train/rewards/", "/mean"),
    ("eval/reward/", "eval/rewards/", "/mean"),
    ("logged/", "train/", ""),
)
"""(our prefix, TRL's prefix, TRL's suffix) of metrics of one reward function or logged by it; its name is in between."""
UNTRANSLATED = ("reward/trained_mean",)


def to_trl_names(values: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics under TRL's names."""
    return {_trl_name(name): value for name, value in values.items()}


def _trl_name(name: str) -> str:
    if name in TRL_NAMES or name in UNTRANSLATED:
        return TRL_NAMES.get(name, name)
    for prefix, before, after in TRL_PREFIXES:
        if name.startswith(prefix):
            return f"{before}{name.removeprefix(prefix)}{after}"
    return name
