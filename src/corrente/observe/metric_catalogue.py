"""Every metric a run writes: its name, unit, reduction and meaning. docs/reference/metrics.md is generated from this.

The reduction over the parts of a step (micro-batches, workers, tokens or episodes of unequal count):

    mean     weighted by what it is a mean of            sum      added
    max      the largest                                 last     the state at the moment of the report
    derived  made of others after they were combined

In a name <b> is a bucket of lag (0, 1, 2, 3-4, 5+ versions), and any other word in <> is named by the run: a reward function, a
scorer, a source of prompts. Means over tokens are over the trained ones unless the meaning says otherwise.
"""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from corrente.data.age import LAG_BUCKETS

Combined = Literal["mean", "sum", "min", "max", "last", "derived"]


class Metric(msgspec.Struct, frozen=True):
    """One metric. ``unit`` is empty for a number without one; <words> in ``name`` stand for names of the run."""

    name: str
    unit: str
    combined: Combined
    meaning: str

    def matches(self, name: str) -> bool:
        return _name_pattern(self.name).fullmatch(name) is not None


def find_metric(name: str) -> Metric | None:
    """The entry of a metric, by the name that a run wrote; None where there is none."""
    rows = [row for _, area in AREAS for row in area]
    exact = next((row for row in rows if row.name == name), None)
    return exact or next((row for row in rows if row.matches(name)), None)


def _name_pattern(name: str) -> re.Pattern[str]:
    bucket = "|".join(re.escape(bucket) for bucket, _, _ in LAG_BUCKETS)
    parts = re.split(r"(<\w+>)", name)
    return re.compile(
        "".join(
            f"(?:{bucket})" if part == "<b>" else ".+" if part.startswith("<") else re.escape(part) for part in parts
        )
    )


def _lag_metric(what: str, unit: str, combined: Combined, meaning: str) -> Metric:
    return Metric(f"lag<b>/{what}", unit, combined, meaning)


def _mismatch_metrics(area: str, of: str) -> tuple[Metric, ...]:
    return (
        Metric(f"{area}/tokens", "tokens", "sum", of),
        Metric(
            f"{area}/logprob_gap_mean", "nats", "mean", "mean of abs(learner - engine) of the log-probs of these tokens"
        ),
        Metric(f"{area}/logprob_gap_max", "nats", "max", "the largest"),
        Metric(f"{area}/kl_k3", "nats", "mean", "k3 estimate of the divergence over them"),
    )


POLICY = (
    Metric("ratio/mean", "", "mean", "r, current over behaviour policy; 1 on average where support is shared"),
    Metric("ratio/max", "", "max", "the largest r"),
    Metric(
        "ratio/ess",
        "fraction",
        "derived",
        "effective sample size (sum r)^2 / (n sum r^2); 1: samples are as good as new",
    ),
    Metric("kl/behaviour_k3", "nats", "mean", "r - 1 - log r: from the policy that sampled to the current one"),
    Metric("kl/reference", "nats", "mean", "k3 to the frozen reference; with algo.beta above 0"),
)

TRAIN = (
    Metric("train/loss", "", "sum", "of the step; its parts hold the step's denominator"),
    Metric("train/grad_norm", "", "derived", "before it is clipped"),
    Metric("train/lr", "", "last", "learning rate of the step"),
    Metric("train/tokens", "tokens", "sum", "trained"),
    Metric("train/distinct_tokens", "tokens", "sum", "positions forwarded, shared prefixes once"),
    Metric("train/padded_tokens", "tokens", "sum", "positions that one padded batch would have forwarded"),
    Metric(
        "train/clip_fraction", "fraction", "mean", "tokens whose gradient the objective or a correction cut or shrank"
    ),
    Metric("train/clip_fraction_low", "fraction", "mean", "those whose ratio was too low"),
    Metric("train/clip_fraction_high", "fraction", "mean", "those whose ratio was too high for a good token"),
    Metric(
        "train/rejected_fraction",
        "fraction",
        "mean",
        "tokens that corrections left out (staleness.correct, band, veto, OPSM)",
    ),
    Metric(
        "train/rejected_sequence_fraction",
        "fraction",
        "mean",
        "those of them left out as whole sequences (band, veto, OPSM)",
    ),
    Metric(
        "train/last_clip_fraction",
        "fraction",
        "mean",
        "clip_fraction of the last update, with algo.num_iterations above 1",
    ),
    Metric(
        "train/entropy", "nats", "mean", "of the current policy where a token was drawn, at the sampling temperature"
    ),
    Metric("distill/tokens", "tokens", "sum", "with log-probs of a teacher; with distill.loss"),
    Metric("distill/reverse_kl", "nats", "mean", "log policy - log teacher over them"),
    Metric("distill/reverse_kl_k3", "nats", "mean", "the same by k3, which is never negative"),
)

LAG = (
    Metric(
        "lag/mean", "versions", "mean", "version the step starts from minus the version that sampled, queueing included"
    ),
    Metric("lag/max", "versions", "max", "the oldest trained token"),
    Metric("lag/bound", "versions", "last", "what lag/max cannot exceed; left out where nothing bounds it"),
    Metric("lag/withheld_fraction", "fraction", "mean", "sampled tokens too old to be trained on; with staleness.mask"),
    _lag_metric("tokens", "tokens", "sum", "trained tokens of this lag; a bucket without any is left out"),
    _lag_metric("ratio_mean", "", "mean", "as ratio/mean, of this lag"),
    _lag_metric("ratio_max", "", "max", "as ratio/max"),
    _lag_metric("ess", "fraction", "derived", "as ratio/ess"),
    _lag_metric("kl_k3", "nats", "mean", "as kl/behaviour_k3"),
    _lag_metric("clip_fraction", "fraction", "mean", "as train/clip_fraction"),
    _lag_metric("rejected_fraction", "fraction", "mean", "as train/rejected_fraction"),
    _lag_metric("rejected_sequence_fraction", "fraction", "mean", "as train/rejected_sequence_fraction"),
    _lag_metric("withheld_fraction", "fraction", "mean", "as lag/withheld_fraction"),
    _lag_metric("entropy", "nats", "mean", "as train/entropy"),
)

MISMATCH = (
    *_mismatch_metrics(
        "mismatch", "trained tokens sampled by exactly the weights of the step; only in the first step of a version"
    ),
    *_mismatch_metrics(
        "mismatch_clean", "those whose completion is of these weights from its first token on: numerics alone"
    ),
    *_mismatch_metrics(
        "mismatch_mixed",
        "the others; larger than mismatch_clean by the effect of keys and values of older weights (swap)",
    ),
)

SAMPLES = (
    Metric(
        "reward/mean", "", "mean", "over episodes scored since the report before, those of filtered groups included"
    ),
    Metric("reward/std", "", "derived", "over the same"),
    Metric("reward/zero_std_fraction", "fraction", "mean", "groups whose rewards are all equal, over the same"),
    Metric("reward/trained_mean", "", "mean", "over the episodes of the step"),
    Metric("reward/agent/<name>", "", "mean", "of one of several agents"),
    Metric("reward/<function>", "", "mean", "of one reward function, over the episodes it applies to"),
    Metric("reward_std/<function>", "", "derived", "of one reward function, over the same"),
    Metric("samples/scored", "episodes", "sum", "scored since the report before"),
    Metric("samples/trained", "episodes", "sum", "in the step's groups"),
    Metric("samples/tokens", "tokens", "sum", "they sampled"),
    Metric("completion/tokens_mean", "tokens", "mean", "sampled by an episode, over those scored"),
    Metric("completion/tokens_max", "tokens", "max", "the longest"),
    Metric("completion/tokens_min", "tokens", "min", "the shortest"),
    Metric("completion/terminated_tokens_mean", "tokens", "mean", "of those that ended by themselves"),
    Metric("completion/terminated_tokens_min", "tokens", "min", "the shortest of them"),
    Metric("completion/terminated_tokens_max", "tokens", "max", "the longest of them"),
    Metric("completion/truncated_fraction", "fraction", "mean", "episodes cut off by the budget"),
    Metric("env/turns", "turns", "mean", "of the policy in an episode"),
    Metric("env/forks", "", "mean", "times that a conversation was rendered anew, in an episode"),
    Metric("env/<number>", "", "mean", "numbers in the info of environments, by episode"),
    Metric("tools/calls", "calls", "mean", "of tools in an episode"),
    Metric("tools/failures", "calls", "mean", "of those that were answered with an error"),
    Metric("tools/<fault>", "calls", "mean", "of those: malformed, unknown, raised, late"),
    Metric("logged/<name>", "", "mean", "values that reward functions log"),
)

EVAL = (
    Metric("eval/reward", "", "mean", "held-out"),
    Metric("eval/episodes", "episodes", "sum", "that were judged"),
    Metric("eval/failed", "episodes", "sum", "that failed"),
    Metric("eval/agent/<name>", "", "mean", "of one of several agents, held-out"),
    Metric("eval/lost", "episodes", "sum", "that have no reward, failed ones included"),
    Metric("eval/version", "versions", "last", "the oldest version that sampled any of them"),
    Metric("eval/version_max", "versions", "max", "the newest"),
    Metric("eval/time_s", "s", "last", "the evaluation took"),
    Metric(
        "eval/<what>",
        "",
        "mean",
        "lengths, pass@k, standard errors, reward functions and sources, as in the table of corrente eval",
    ),
)

TIME = (
    Metric("time/elapsed_s", "s", "last", "since the run began, earlier parts of it included"),
    Metric("time/step_s", "s", "last", "from the wait for groups to the end of the export"),
    Metric("time/wait_groups_s", "s", "last", "of it, waiting for groups"),
    Metric("time/stage_s", "s", "last", "of it, waiting for the flip before and for the copy of its weights"),
    Metric("learner/busy_s", "s", "last", "of it, computing"),
    Metric("learner/idle_fraction", "fraction", "derived", "of the time since the report before"),
    Metric("learner/tokens_per_s", "tokens/s", "derived", "trained, over the time since the report before"),
    Metric("engine/busy_s", "s", "sum", "since the engines began"),
    Metric("engine/idle_fraction", "fraction", "derived", "of the time since the report before"),
    Metric("engine/tokens_per_s", "tokens/s", "derived", "sampled, over the time since the report before"),
    Metric("engine/prefill_tokens", "tokens", "sum", "of prompts and rebuilt prefixes, since the engines began"),
    Metric("engine/decode_tokens", "tokens", "sum", "sampled, since the engines began"),
    Metric("engine/ready", "replicas", "last", "with the current weights"),
    Metric("wait/learner_groups_fraction", "fraction", "derived", "of the time, the learner waited for groups"),
    Metric(
        "wait/learner_publish_fraction",
        "fraction",
        "derived",
        "of the time, the learner waited for the flip of the version before",
    ),
    Metric("wait/feed_slot_fraction", "fraction", "derived", "of the time, admission waited for a free slot"),
)

FLOW = (
    Metric("version/learner", "versions", "last", "the learner's next step starts from"),
    Metric("version/live", "versions", "last", "the engines sample from"),
    Metric(
        "groups/<outcome>",
        "groups",
        "sum",
        "that ended so, since the run began: trained, filtered, failed, stale, cancelled",
    ),
    Metric("buffer/<place>", "groups", "last", "generating, ready, in training; and slots there are, 0: no limit"),
    Metric("publish/bytes", "bytes", "last", "moved by the last publish"),
    Metric(
        "publish/stage_s",
        "s",
        "last",
        "it took to bring to the engines: the export and the delivery, less waiting for slots",
    ),
    Metric("publish/export_s", "s", "last", "that the learner waited for its copy"),
    Metric("publish/copy_s", "s", "last", "of it, copying out of the learner"),
    Metric("publish/deliver_s", "s", "last", "that its delivery took, beside the learner's next step"),
    Metric("publish/bandwidth_gb_s", "GB/s", "last", "of the whole of it"),
    Metric("publish/pause_ms", "ms", "last", "the engine paused at the flip"),
    Metric("publish/whole", "", "last", "1: every weight was sent, 0: the changed ones only"),
    Metric("publish/follower_missed", "versions", "last", "that did not reach the self-teacher, since the start"),
    Metric(
        "publish/follower_wait_s",
        "s",
        "last",
        "that the last delivery waited for the self-teacher to fetch the live version",
    ),
    Metric("publish/<what>", "", "last", "further numbers of one transport"),
    Metric("score/<scorer>_<what>", "", "last", "queue, latency and failures of one scorer"),
)

AREAS: tuple[tuple[str, tuple[Metric, ...]], ...] = (
    ("The policy and its samples", POLICY),
    ("By lag", LAG),
    ("Engine against learner at equal weights", MISMATCH),
    ("The optimizer step", TRAIN),
    ("Episodes", SAMPLES),
    ("Evaluation", EVAL),
    ("Time", TIME),
    ("Flow", FLOW),
)
