"""The whole of a run: what is trained how long, its limits, evaluation and checkpoints, and every other section."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from corrente.config.adapters import Full, Lora, LoraMerged
from corrente.config.algorithm import Algo, Distill
from corrente.config.buffer import Double, NoBuffer, Stream, Window
from corrente.config.engine import Embedded, Model, Pool, Vllm
from corrente.config.env import Environments, SingleTurn, Tools
from corrente.config.inflight import Barrier, Cancel, Drain, OldWeights, Recompute, Resume, Swap
from corrente.config.learner import LearnerConfig, Single
from corrente.config.observe import Alarm, Observe
from corrente.config.prompts import (
    Arithmetic,
    ArithmeticSource,
    Chat,
    Dataset,
    GivenRows,
    Jsonl,
    JsonlSource,
    Mixture,
    Parquet,
    ParquetSource,
    ReasoningGym,
    Seeds,
)
from corrente.config.rewards import Reward
from corrente.config.runtime import Inline, Procs
from corrente.config.section import Fraction, Natural, NonNegative, Positive, Seconds, Section, UserKind
from corrente.config.staleness import Staleness
from corrente.config.sync import Collective, CudaIpc, Disk, Http, Inproc, Shm, VllmNccl
from corrente.data.types import Sampling


class Run(Section, frozen=True, kw_only=True):
    name: str = "run"
    """Names the run folder; where it is taken, "-2", "-3", ... is added."""
    dir: str = "runs"
    """Folder of run folders."""
    seed: Natural = 0
    """Decides prompts, their order and every sampled token, for equal weights."""
    steps: Positive = 100
    """Optimizer steps. A multiple of sync.every, so that a run ends on a version."""
    prompts_per_step: Positive = 8
    """P: groups per optimizer step."""
    group_size: Annotated[int, Meta(ge=2)] = 8
    """G: completions per prompt. A single completion has no baseline to be compared with."""


# ---- stages -------------------------------------------------------------------------------------------------------------------


class UserFilter(UserKind, frozen=True, kw_only=True, tag="user"):
    """A function of yours that says why a group is filtered. Every key besides kind is one of its keyword arguments."""


class Filter(Section, frozen=True, kw_only=True):
    zero_variance: Literal["replace", "skip", "keep"] = "replace"
    """Groups whose rewards are all equal. replace: counted as filtered, another is admitted. skip: part of the step,
    with no forward pass, for their gradient is zero. keep: trained like any other."""
    tolerance: NonNegative = 1e-6
    """Rewards that differ by no more than this are equal."""
    pass_reward: float = 1.0
    """An episode passes with at least this reward; see pass_rate_min and pass_rate_max."""
    pass_rate_min: Fraction = 0.0
    """Filter groups of which a smaller part passes: too hard."""
    pass_rate_max: Fraction = 1.0
    """Filter groups of which a larger part passes: too easy."""
    truncated_max: Fraction = 1.0
    """Filter groups of which a larger part was cut off by the budget."""
    repetition_max: Fraction = 1.0
    """Filter groups in which, on average, a larger part of a completion's 4-grams of tokens was there before."""
    rules: tuple[UserFilter, ...] = ()
    """[[filter.rules]] tables: functions of yours that filter groups, asked in this order after the keys above. kind is a
    function's name, every other key one of its keyword arguments: see [write an
    objective](../how-to/write-an-objective.md#a-filter)."""
    patience: Positive = 20
    """End the run after this many batches' worth of filtered groups in a row."""


class Limits(Section, frozen=True, kw_only=True):
    episode_s: Seconds = 600.0
    """Deadline of one episode's generation. Waiting for its turn at the engine does not count."""
    watchdog_s: Seconds = 900.0
    """End the run when nothing moved for this long. A learner in the middle of a step and an engine that writes tokens move."""
    failure_fraction: Fraction = 0.5
    """End the run when more than this part of the last failure_window attempts at one boundary failed; where the data ends before
    there were so many, of all of them."""
    failure_window: Positive = 64
    """Attempts, per boundary, that limits.failure_fraction looks at; at least twice the episodes that may be under way."""
    stop_s: Seconds = 10.0
    """Time the workers get to stop before they are killed."""


class Eval(Section, frozen=True, kw_only=True):
    every: Natural = 10
    """Versions between evaluations on held-out prompts; 0: never."""
    at_start: bool = True
    """Evaluate the weights a run begins with, before they were trained."""
    prompts: Positive = 64
    """Held-out prompts, at most."""
    sources: tuple[ArithmeticSource | JsonlSource | ParquetSource, ...] = ()
    """[[eval.sources]] tables: evaluate on these, in equal parts, not on what [prompts] holds out. Of a file: eval_path, or else
    path."""
    samples: Positive = 1
    """Completions of each."""
    pass_at: tuple[Positive, ...] = (1,)
    """Report pass@k for each of these k, none above eval.samples: how likely one of k completions of a prompt passes."""
    pass_reward: float = 1.0
    """A completion passes with at least this reward."""
    temperature: NonNegative | None = None
    """Temperature of evaluation alone; 0: greedy. None: greedy with one sample, sampling.temperature with several."""
    top_k: Natural = 0
    """sampling.top_k of evaluation alone; 0: off."""
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """sampling.top_p of evaluation alone; 1: off."""
    min_p: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    """sampling.min_p of evaluation alone; 0: off."""
    max_tokens: Natural = 0
    """Most tokens of one completion in evaluation; 0: sampling.max_tokens."""
    at_once: Natural = 0
    """Completions generated at once beside training; 0: as many as a step has. After the last step: all."""
    deadline_s: Seconds = 600.0
    """Deadline of one evaluation; samples that are not done by then are counted as lost."""


class Checkpoint(Section, frozen=True, kw_only=True):
    every: Natural = 50
    """Steps; a multiple of sync.every. 0: only when stopped or at the end."""
    keep: Positive = 2
    """Complete checkpoints that are kept."""


class RunConfig(Section, frozen=True, kw_only=True):
    """The whole of a run."""

    run: Run = Run()
    model: Model = Model()
    prompts: Arithmetic | Jsonl | Parquet | Dataset | GivenRows | Seeds | ReasoningGym | Mixture = Arithmetic()
    chat: Chat = Chat()
    env: SingleTurn | Tools | Environments = SingleTurn()
    reward: Reward = Reward()
    sampling: Sampling = Sampling()
    runtime: Inline | Procs = Procs()
    buffer: NoBuffer | Double | Window | Stream = Window()
    sync: Inproc | Shm | Disk | Http | Collective | VllmNccl | CudaIpc = Shm()
    staleness: Staleness = Staleness()
    inflight: Swap | Recompute | Resume | Drain | Barrier | Cancel | OldWeights = Swap()
    adapters: Full | Lora | LoraMerged = Full()
    backend: Single = Single()
    engine: Embedded | Vllm = Embedded()
    pool: Pool = Pool()
    algo: Algo = Algo()
    distill: Distill = Distill()
    learner: LearnerConfig = LearnerConfig()
    filter: Filter = Filter()
    limits: Limits = Limits()
    eval: Eval = Eval()
    checkpoint: Checkpoint = Checkpoint()
    observe: Observe = Observe()
    alarm: Alarm = Alarm()
