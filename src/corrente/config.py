"""Every knob, its default and what it may be: one frozen section per axis, tagged by ``kind``. Imports no torch.

A config says intent; what follows from it (slots, bounds, denominators) is derived in code and never written back.
``load`` reads TOML and overrides, refuses unknown keys with the nearest valid name, and ``check`` refuses combinations that
cannot work, all before a model is loaded.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from corrente.playing import Environments, SingleTurn, Tools
from corrente.scoring import ScorerConfig
from corrente.sections import Fraction, Kind, Natural, NonNegative, Positive, PositiveFloat, Seconds, Section
from corrente.sources import (
    Arithmetic,
    ArithmeticSource,
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
from corrente.teaching import Algo, Distill, Staleness
from corrente.transports import Collective, CudaIpc, Disk, Http, Inproc, Shm, VllmNccl
from corrente.types import Sampling

# ---- what is run ------------------------------------------------------------------------------------------------------------


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


class Model(Section, frozen=True, kw_only=True):
    path: str = "smollm2-135m-instruct"
    """A directory with a Hugging Face causal LM, or a name `corrente fetch` knows."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Of learner and embedded engines. auto: a GPU where torch finds one. cuda: refused where it finds none."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto: bfloat16 on a GPU that has it, float32 elsewhere."""
    keep_routing: bool | None = None
    """Of a mixture of experts: record which experts each token was sent to, and have the learner send it there too. None: where
    the engine can say; true: refused where it cannot."""


class Chat(Section, frozen=True, kw_only=True):
    """How conversations become what the model reads; prompts that are plain text are read as they are."""

    template: str = ""
    """A Jinja template, or a file with one; empty: the one that comes with the model's tokenizer."""
    template_kwargs: dict[str, Any] = msgspec.field(default_factory=dict[str, Any])
    """What the template is told beside messages and tools, such as enable_thinking = false."""
    system: str = ""
    """System message of conversations that bring none; empty: what the template does then."""


class Reward(Section, frozen=True, kw_only=True):
    functions: tuple[str, ...] = ("exact_line",)
    """Built-in names, "package.module:function", or "path/to/file.py:function". Empty by default where there are scorers."""
    weights: tuple[float, ...] = ()
    """One per function; empty: all 1."""
    deadline_s: Seconds = 30.0
    """Of one call of one function; past it the group counts as failed."""
    scorers: tuple[ScorerConfig, ...] = ()
    """More of what a reward is made of, each with terms of its own: a [[reward.scorers]] table with a kind."""


# ---- the seven axes -----------------------------------------------------------------------------------------------------------


class Inline(Kind, frozen=True, kw_only=True, tag="inline"):
    """Everything in this process: the synchronous baseline, and where to set a breakpoint."""

    threads: Natural = 0
    """torch threads; 0: as many as cores."""


class Procs(Kind, frozen=True, kw_only=True, tag="procs"):
    """A controller in this process, engine and learner in children of it."""

    placement: Literal["shared", "pinned", "priority"] = "shared"
    """shared: both sides may use every core. pinned: cores split. priority: shared, the engine goes first."""
    start_deadline_s: Seconds = 300.0
    """Time the workers get to load their models."""


class NoBuffer(Kind, frozen=True, kw_only=True, tag="none"):
    """Strictly alternating: generate a batch, train on it, publish."""


class Double(Kind, frozen=True, kw_only=True, tag="double"):
    """One version ahead: the next batch is generated while this one is trained on."""


class Window(Kind, frozen=True, kw_only=True, tag="window"):
    """Bounded; admission order with a look-ahead window anchored at the oldest group."""

    window: Natural = 0
    """W groups; 1: strict FIFO; 0: max(1, floor(0.3 B)) of the B slots."""


class Stream(Kind, frozen=True, kw_only=True, tag="stream"):
    """Unbounded, in order of completion; only version control (staleness.reject or staleness.mask) bounds age."""

    inflight: Natural = 0
    """Groups generated at once; 0: twice prompts_per_step."""


class Swap(Kind, frozen=True, kw_only=True, tag="swap"):
    """Live sequences go on under the new weights and keep their key/value cache."""


class Recompute(Kind, frozen=True, kw_only=True, tag="recompute"):
    """Live sequences go on; their key/value cache is rebuilt under the new weights."""


class Drain(Kind, frozen=True, kw_only=True, tag="drain"):
    """Live requests finish first, new ones wait, then weights change: no sequence mixes versions."""


class Barrier(Kind, frozen=True, kw_only=True, tag="barrier"):
    """Every admitted group finishes first: no group mixes versions."""


class Resume(Kind, frozen=True, kw_only=True, tag="resume"):
    """Live requests are aborted and sent again from where they were: the cache is rebuilt by an ordinary prefill."""


class Cancel(Kind, frozen=True, kw_only=True, tag="cancel"):
    """Groups still generating that are too old are given up as wholes, and others admitted; the rest goes on as with swap."""

    max_age: Natural = 1
    """Versions since its admission that a group may see land while it generates."""


class Snapshot(Kind, frozen=True, kw_only=True, tag="snapshot"):
    """Live requests finish under the weights they began with, new ones use the new: no sequence mixes versions and none waits.
    The next version is staged once nobody uses the oldest."""


class Full(Kind, frozen=True, kw_only=True, tag="full"):
    """All parameters are trained and shipped."""


class _Lora(Kind, frozen=True, kw_only=True):
    rank: Positive = 16
    """Of the two factors."""
    alpha: PositiveFloat = 32.0
    """The product of the factors is scaled by alpha / rank."""
    dropout: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    """Of an adapter's input, in training; above 0 the policy that is trained is not quite the one that sampled."""
    targets: tuple[str, ...] = ("all-linear",)
    """Names, or ends of names, of the layers that get an adapter; "all-linear": every linear layer but the output."""
    target_parameters: tuple[str, ...] = ()
    """Names, or ends of names, of parameters that are no layer's weight, like the fused experts of a mixture."""
    init: str = ""
    """A peft directory to start from; empty: a new adapter, which changes nothing until it is trained."""


class Lora(_Lora, frozen=True, kw_only=True, tag="lora"):
    """Low-rank adapters are trained (Hu et al. 2021, arXiv:2106.09685), and only they are shipped; engines add them unmerged."""


class LoraMerged(_Lora, frozen=True, kw_only=True, tag="lora_merged"):
    """Low-rank adapters are trained and merged into the weights that are shipped: for engines that know no adapters."""


class Single(Kind, frozen=True, kw_only=True, tag="single"):
    """One device."""


# ---- stages -------------------------------------------------------------------------------------------------------------------


class Embedded(Kind, frozen=True, kw_only=True, tag="embedded"):
    """Any Hugging Face causal LM in this process or a child, continuous batching, in-flight weight updates."""

    max_sequences: Positive = 64
    """Sequences decoded at once."""
    max_context: Natural = 0
    """Tokens of prompt and completion together; 0: what the model allows, at most 4096."""
    path: Literal["auto", "lean", "hf"] = "auto"
    """lean: fused forward for the Llama family; hf: the unmodified model; auto: lean where it applies."""


class Vllm(Kind, frozen=True, kw_only=True, tag="vllm"):
    """A vLLM server: launched with the interpreter of an environment that has vllm, or attached to where one runs."""

    python: str = ""
    """Interpreter that has vllm; empty: the one `corrente doctor` finds, if no urls are given."""
    urls: tuple[str, ...] = ()
    """Servers that run already; each becomes a replica. Empty: launch pool.replicas of them."""
    token: str = ""
    """Bearer token; empty: what the environment variable CORRENTE_VLLM_TOKEN says, else none (a launched server gets one)."""
    verify: bool | str = True
    """TLS certificates: true, false, or the path of a bundle to check them against."""
    max_sequences: Positive = 64
    """Sequences decoded at once, of a launched server."""
    max_context: Natural = 0
    """Tokens of prompt and completion together; 0: what the model allows, at most 4096."""
    args: tuple[str, ...] = ()
    """More arguments of `vllm serve`, for a launched server."""
    retries: Natural = 5
    """Attempts after a lost connection or a 5xx, until request_deadline_s; a 4xx fails at once."""
    request_deadline_s: Seconds = 600.0
    """Of one request, its retries included."""
    start_deadline_s: Seconds = 600.0
    """Time a server gets until it answers, launched or attached to."""
    prefix_cache: Literal["salt", "reset"] = "salt"
    """What keeps keys of old weights from new requests: a salt per version, or a reset at every flip, of live requests' too."""


class Pool(Section, frozen=True, kw_only=True):
    """Replicas of the engine behind one."""

    replicas: Positive = 1
    """Engines at the start; each is a process of its own."""
    restarts: Natural = 3
    """Times in a run that a replica which died is replaced; past it the others go on, and the run ends with the last."""
    join: bool = False
    """Let `corrente engine --join` add engines of this host to a run."""


class Learner(Section, frozen=True, kw_only=True):
    lr: PositiveFloat = 1e-5
    """Learning rate of AdamW."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate after the warm-up, over run.steps; linear and cosine end at 0."""
    warmup_steps: Natural = 0
    """Steps in which the learning rate rises to lr."""
    weight_decay: NonNegative = 0.0
    """Decoupled, as in AdamW."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of the gradient's running mean and square."""
    eps: PositiveFloat = 1e-8
    """Added to the denominator of the update."""
    max_grad_norm: NonNegative = 1.0
    """Largest norm of a step's gradient, scaled down above it. 0: no clipping."""
    micro_batch_tokens: Positive = 2048
    """Distinct tokens of one forward pass; does not change the gradient."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time."""
    router_aux_loss_coef: NonNegative = 0.0
    """Of a mixture of experts: weight of the load-balancing loss. 0: off."""


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
    """Of evaluation alone; 0: greedy. None: greedy with one sample, sampling.temperature with several."""
    top_k: Natural = 0
    """Of evaluation alone; 0: off."""
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Of evaluation alone."""
    min_p: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    """Of evaluation alone."""
    max_tokens: Natural = 0
    """Of one completion in evaluation; 0: sampling.max_tokens."""
    at_once: Natural = 0
    """Completions generated at once beside training; 0: as many as a step has. After the last step: all."""
    deadline_s: Seconds = 600.0
    """Of one evaluation; what is not done by then is counted as lost."""


class Checkpoint(Section, frozen=True, kw_only=True):
    every: Natural = 50
    """Steps; a multiple of sync.every. 0: only when stopped or at the end."""
    keep: Positive = 2
    """Complete checkpoints that are kept."""


class Observe(Section, frozen=True, kw_only=True):
    samples: Natural = 4
    """Episodes a step written to samples.jsonl."""
    timeline: bool = True
    """Write timeline.jsonl."""
    trackers: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ()
    """Where numbers and samples go besides the run folder; one that fails costs a warning."""
    project: str = "corrente"
    """Project of wandb and trackio."""
    run_name: str = ""
    """Name of the run there; empty: that of the run folder."""


class Alarm(Section, frozen=True, kw_only=True):
    """Bands that what a step reports of its samples should stay in; a warning, once, where it does not."""

    ess_min: Fraction = 0.5
    """Least effective sample size of a step (ratio/ess), as a part of its tokens. 0: no alarm."""
    mismatch_max: NonNegative = 0.1
    """Largest mean gap, in nats, between engine and learner about tokens of the same weights. 0: no alarm."""
    action: Literal["warn", "stop"] = "warn"
    """stop: end the run at the next version, with a checkpoint and an error."""


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
    inflight: Swap | Recompute | Resume | Drain | Barrier | Cancel | Snapshot = Swap()
    adapters: Full | Lora | LoraMerged = Full()
    backend: Single = Single()
    engine: Embedded | Vllm = Embedded()
    pool: Pool = Pool()
    algo: Algo = Algo()
    distill: Distill = Distill()
    learner: Learner = Learner()
    filter: Filter = Filter()
    limits: Limits = Limits()
    eval: Eval = Eval()
    checkpoint: Checkpoint = Checkpoint()
    observe: Observe = Observe()
    alarm: Alarm = Alarm()
