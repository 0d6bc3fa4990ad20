"""Sources of rewards: the kinds of ``[[reward.scorers]]`` in a config. Their code is in score/."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from corrente.config.section import Kind, Natural, Positive, PositiveFloat, Seconds, Section


class _Scorer(Kind, frozen=True, kw_only=True):
    name: str = ""
    """Of its scores and metrics; empty: the function's, or the kind."""
    deadline_s: Seconds = 30.0
    """Of one call; waiting for its turn is not counted."""


class _Weighed(_Scorer, frozen=True, kw_only=True):
    weight: float = 1.0
    """Of its score in the reward."""
    failure: Literal["lose", "none", "default"] = "lose"
    """What a failed call costs. lose: the episode. none: the scorer does not apply to it. default: it gave the default."""
    default: float = 0.0
    """With failure default: the score."""


class FunctionScorer(_Weighed, frozen=True, kw_only=True, tag="function"):
    """A Python function in a thread of the controller, or on its event loop when it is async."""

    function: str
    """A built-in name, "package.module:function", or "path/to/file.py:function"."""
    options: dict[str, Any] = msgspec.field(default_factory=dict[str, Any])
    """Keyword arguments it is given besides."""
    at_once: Natural = 0
    """Calls at once; 0: 64, in threads of its own, or as many as there are groups where it is async."""


class ProcessScorer(_Weighed, frozen=True, kw_only=True, tag="process"):
    """A Python function in processes of its own, killed when late: for what hangs, uses signals, forks, exits or crashes."""

    function: str
    """A built-in name, "package.module:function", or "path/to/file.py:function"; imported by each process."""
    options: dict[str, Any] = msgspec.field(default_factory=dict[str, Any])
    """Keyword arguments it is given besides."""
    workers: Positive = 1
    """Processes, hence calls at once."""


class ModelScorer(_Scorer, frozen=True, kw_only=True):
    """Settings that all models which score have in common."""

    path: str
    """A directory with a Hugging Face model and its tokenizer."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of its weights."""
    batch: Positive = 16
    """Most samples in one forward pass."""
    batch_tokens: Positive = 2048
    """Most tokens in one forward pass, padding included; a longer sample goes alone."""
    threads: Natural = 0
    """torch threads of its process; 0: as many as cores."""
    at_once: Natural = 0
    """Episodes that wait for it at once; 0: all there are."""
    deadline_s: Seconds = 120.0
    """Of one forward pass of a batch; waiting for its turn is not counted."""


class _WeighedModel(ModelScorer, frozen=True, kw_only=True):
    weight: float = 1.0
    """Of its score in the reward."""
    failure: Literal["lose", "none", "default"] = "lose"
    """What a failed call costs. lose: the episode. none: the scorer does not apply to it. default: it gave the default."""
    default: float = 0.0
    """With failure default: the score."""


class RewardModelScorer(_WeighedModel, frozen=True, kw_only=True, tag="reward_model"):
    """A sequence classifier, in a process of its own: its logit is the score."""

    chat: bool | Literal["given"] = True
    """Render prompt and completion with its chat template, if it has one; false: join them as they are. given: render what is
    a conversation, and join text without special tokens, as TRL does."""
    label: Natural = 0
    """Which logit."""


class ProcessRewardScorer(_WeighedModel, frozen=True, kw_only=True, tag="process_reward"):
    """A token classifier that judges step after step, in a process of its own."""

    delimiter: str = "\\n+"
    """Regular expression that ends a step."""
    separator: str = "\n"
    """What stands after each step in what the model reads; its prediction there is the step's."""
    label: Natural = 1
    """Which label's probability is a step's score."""
    aggregate: Literal["min", "mean", "product", "last"] = "min"
    """The episode's score, of those of its steps."""


class JudgeScorer(_Weighed, frozen=True, kw_only=True, tag="judge"):
    """An LLM behind an OpenAI-compatible endpoint, asked about each completion."""

    url: str
    """Up to and with /v1; /chat/completions is added."""
    model: str
    """The name the server knows it by."""
    template: str = (
        "Rate how well the answer solves the task, from 0 (not at all) to 10 (fully).\n\n"
        "Task:\n{prompt}\n\nAnswer:\n{completion}\n\nReply with the number alone."
    )
    """The question; {prompt}, {completion} and the columns of the prompt are filled in."""
    system: str = ""
    """A system message; empty: none."""
    field: str = ""
    """The answer holds a JSON object, and the number is this key of it; empty: see pattern."""
    pattern: str = "(-?\\d+(?:\\.\\d+)?)"
    """Regular expression with one group, the number; its last match counts."""
    lowest: float = 0.0
    """The number that is score 0; below it is no answer."""
    highest: float = 10.0
    """The number that is score 1; above it is no answer."""
    max_tokens: Positive = 256
    """Of the answer."""
    token: str = ""
    """Bearer token; empty: what the environment variable CORRENTE_JUDGE_TOKEN says, else none."""
    verify: bool | str = True
    """TLS certificates: true, false, or the path of a bundle to check them against."""
    at_once: Natural = 16
    """Questions open at once; 0: all there are."""
    deadline_s: Seconds = 60.0
    """Of one question, asked again after a lost connection or a 5xx; waiting for its turn is not counted."""


class TeacherScorer(ModelScorer, frozen=True, kw_only=True, tag="teacher"):
    """A causal LM that reads the policy's tokens, in a process of its own: its log-probs are kept with the episode."""

    where: dict[str, Any] = msgspec.field(default_factory=dict[str, Any])
    """Which prompts it teaches: columns and their value, or list of values, such as { source = "sums" }. Empty: all."""
    weight: PositiveFloat = 1.0
    """Of what it says, beside other teachers of the same prompt."""
    temperature: PositiveFloat | None = None
    """Divides its logits. None: sampling.temperature, so that teacher and policy are read alike."""
    failure: Literal["lose", "none"] = "lose"
    """What a failed call costs. lose: the episode. none: it is not taught."""
    top: Natural = 0
    """Likeliest tokens kept at each place, besides the one that was sampled; what distill.loss "jsd" is made of."""


class ServedTeacherScorer(_Scorer, frozen=True, kw_only=True, tag="teacher_server"):
    """A causal LM behind vLLM's OpenAI-compatible endpoint, which gives the log-probs of a prompt's tokens."""

    url: str
    """Up to and with /v1; /completions is added."""
    model: str
    """The name the server knows it by."""
    tokenizer: str
    """A directory with its tokenizer, to be compared with the policy's."""
    where: dict[str, Any] = msgspec.field(default_factory=dict[str, Any])
    """Which prompts it teaches: columns and their value, or list of values, such as { source = "sums" }. Empty: all."""
    weight: PositiveFloat = 1.0
    """Of what it says, beside other teachers of the same prompt."""
    failure: Literal["lose", "none"] = "lose"
    """What a failed call costs. lose: the episode. none: it is not taught."""
    top: Natural = 0
    """Likeliest tokens kept at each place, besides the one that was sampled; a server allows so many (vLLM: 20)."""
    token: str = ""
    """Bearer token; empty: what the environment variable CORRENTE_JUDGE_TOKEN says, else none."""
    verify: bool | str = True
    """TLS certificates: true, false, or the path of a bundle to check them against."""
    at_once: Natural = 16
    """Episodes asked about at once; 0: all there are."""
    deadline_s: Seconds = 120.0
    """Of one episode, asked again after a lost connection or a 5xx; waiting for its turn is not counted."""


class SelfTeacherScorer(_Scorer, frozen=True, kw_only=True, tag="self_teacher"):
    """The policy of some versions ago, in an engine of its own that follows the run: each version reaches it as it goes live."""

    lag: Positive = 1
    """Versions it is behind the live one; it keeps lag + 2 copies of the weights. Before there are as many: the first version."""
    where: dict[str, Any] = msgspec.field(default_factory=dict[str, Any])
    """Which prompts it teaches: columns and their value, or list of values, such as { source = "sums" }. Empty: all."""
    weight: PositiveFloat = 1.0
    """Of what it says, beside other teachers of the same prompt."""
    temperature: PositiveFloat | None = None
    """Divides its logits. None: sampling.temperature, so that teacher and policy are read alike."""
    failure: Literal["lose", "none"] = "lose"
    """What a failed call costs. lose: the episode. none: it is not taught."""
    top: Natural = 0
    """Likeliest tokens kept at each place, besides the one that was sampled; what distill.loss "jsd" is made of."""
    at_once: Natural = 0
    """Episodes that wait for it at once; 0: all there are."""
    deadline_s: Seconds = 120.0
    """Of one episode; waiting for its turn is not counted."""


Teaching = TeacherScorer | ServedTeacherScorer | SelfTeacherScorer
"""Scorers that give no reward, but log-probs to learn from."""


def temperature_of(teacher: TeacherScorer | SelfTeacherScorer, *, sampling: float) -> float:
    """At which a teacher is read, where tokens are sampled at ``sampling``."""
    return sampling if teacher.temperature is None else teacher.temperature


ScorerConfig = (
    FunctionScorer
    | ProcessScorer
    | RewardModelScorer
    | ProcessRewardScorer
    | JudgeScorer
    | TeacherScorer
    | ServedTeacherScorer
    | SelfTeacherScorer
)


class Reward(Section, frozen=True, kw_only=True):
    functions: tuple[str, ...] = ("exact_line",)
    """Built-in names, "package.module:function", or "path/to/file.py:function". Empty by default where there are scorers."""
    weights: tuple[float, ...] = ()
    """One per function; empty: all 1."""
    deadline_s: Seconds = 30.0
    """Of one call of one function; past it the group counts as failed."""
    scorers: tuple[ScorerConfig, ...] = ()
    """More of what a reward is made of, each with terms of its own: a [[reward.scorers]] table with a kind."""
