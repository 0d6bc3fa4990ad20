"""Every knob, its default and what it may be: one frozen section per axis, tagged by ``kind``. Imports no torch.

A config says intent; what follows from it (slots, bounds, denominators) is derived in code and never written back.
``load`` reads TOML and overrides, refuses unknown keys with the nearest valid name, and ``check`` refuses combinations that
cannot work, all before a model is loaded.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from corrente.types import Sampling

Positive = Annotated[int, Meta(ge=1)]
Natural = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(gt=0)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
PositiveFloat = Annotated[float, Meta(gt=0)]
NonNegative = Annotated[float, Meta(ge=0)]


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=False):
    pass


class _Kind(_Section, frozen=True, kw_only=True, tag_field="kind", tag=str.lower):
    pass


# ---- what is run ------------------------------------------------------------------------------------------------------------


class Run(_Section, frozen=True, kw_only=True):
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


class Model(_Section, frozen=True, kw_only=True):
    path: str = "smollm2-135m-instruct"
    """A directory with a Hugging Face causal LM, or a name `corrente fetch` knows."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto: bfloat16 on an accelerator that has it, float32 elsewhere."""


class Arithmetic(_Kind, frozen=True, kw_only=True, tag="arithmetic"):
    """Sums of two numbers behind worked examples, drawn without end; a part of all pairs is held out for evaluation."""

    digits: Annotated[int, Meta(ge=1, le=6)] = 1
    """Of both numbers."""
    shots: Natural = 2
    """Worked examples before each sum."""
    held_out: Annotated[float, Meta(gt=0, lt=1)] = 0.2
    """Part of all pairs that is never trained on, in either order."""


class Jsonl(_Kind, frozen=True, kw_only=True, tag="jsonl"):
    """One JSON object a line; ``column`` is the prompt text, the other columns reach the reward functions."""

    path: str
    """A JSON Lines file."""
    column: str = "prompt"
    """The column that holds the prompt; every row needs it, as text."""
    eval_path: str = ""
    """Rows for evaluation; empty: no evaluation."""
    epochs: Natural = 1
    """0: repeat for ever."""
    shuffle: bool = True
    """Another order each epoch, from run.seed; false: the order of the file."""


class Reward(_Section, frozen=True, kw_only=True):
    functions: tuple[str, ...] = ("exact_line",)
    """Built-in names, "package.module:function", or "path/to/file.py:function"."""
    weights: tuple[float, ...] = ()
    """One per function; empty: all 1."""
    deadline_s: Seconds = 30.0
    """Of one call of one function; past it the group counts as failed."""


# ---- the seven axes -----------------------------------------------------------------------------------------------------------


class Inline(_Kind, frozen=True, kw_only=True, tag="inline"):
    """Everything in this process: the synchronous baseline, and where to set a breakpoint."""

    threads: Natural = 0
    """torch threads; 0: as many as cores."""


class Procs(_Kind, frozen=True, kw_only=True, tag="procs"):
    """A controller in this process, engine and learner in children of it."""

    placement: Literal["shared", "pinned", "priority"] = "priority"
    """shared: both sides may use every core. pinned: cores split. priority: shared, the engine goes first."""
    start_deadline_s: Seconds = 300.0
    """Time the workers get to load their models."""


class NoBuffer(_Kind, frozen=True, kw_only=True, tag="none"):
    """Strictly alternating: generate a batch, train on it, publish."""


class Double(_Kind, frozen=True, kw_only=True, tag="double"):
    """One version ahead: the next batch is generated while this one is trained on."""


class Window(_Kind, frozen=True, kw_only=True, tag="window"):
    """Bounded; admission order with a look-ahead window anchored at the oldest group."""

    window: Natural = 0
    """W groups; 1: strict FIFO; 0: max(1, floor(0.3 B)) of the B slots."""


class Stream(_Kind, frozen=True, kw_only=True, tag="stream"):
    """Unbounded, in order of completion; only version control (staleness.reject or staleness.mask) bounds age."""

    inflight: Natural = 0
    """Groups generated at once; 0: twice prompts_per_step."""


class Inproc(_Kind, frozen=True, kw_only=True, tag="inproc"):
    """Two weight buffers in this process."""

    every: Positive = 1
    """Optimizer steps per published version."""
    retries: Natural = 3
    """Attempts after a failed publish before the run ends."""


class Shm(_Kind, frozen=True, kw_only=True, tag="shm"):
    """Two weight buffers in memory shared by learner and engine: a flip copies nothing."""

    every: Positive = 1
    """Optimizer steps per published version."""
    retries: Natural = 3
    """Attempts after a failed publish before the run ends."""


class Staleness(_Section, frozen=True, kw_only=True):
    """Gate, reject, mask and correct; any combination."""

    max: Natural = 1
    """S: versions the generator may run ahead. Fixed by buffer.kind none (0) and double (1), unused by stream."""
    reject: Natural | None = None
    """Drop a group whose oldest trained token is older than this many versions when it would be trained on."""
    mask: Natural | None = None
    """Withhold from the loss tokens older than this many versions; the reward stays in the baseline."""
    correct: Literal["none", "tis", "mis"] = "none"
    """Importance weight of sampled tokens in the loss: none beyond the objective's own ratio, truncated, or masked."""
    correct_cap: PositiveFloat = 2.0
    """Where tis truncates the weight, and above which mis leaves a token out."""


class Swap(_Kind, frozen=True, kw_only=True, tag="swap"):
    """Live sequences go on under the new weights and keep their key/value cache."""


class Recompute(_Kind, frozen=True, kw_only=True, tag="recompute"):
    """Live sequences go on; their key/value cache is rebuilt under the new weights."""


class Drain(_Kind, frozen=True, kw_only=True, tag="drain"):
    """Live requests finish first, new ones wait, then weights change: no sequence mixes versions."""


class Barrier(_Kind, frozen=True, kw_only=True, tag="barrier"):
    """Every admitted group finishes first: no group mixes versions."""


class Full(_Kind, frozen=True, kw_only=True, tag="full"):
    """All parameters are trained and shipped."""


class Single(_Kind, frozen=True, kw_only=True, tag="single"):
    """One device."""


# ---- stages -------------------------------------------------------------------------------------------------------------------


class Embedded(_Kind, frozen=True, kw_only=True, tag="embedded"):
    """Any Hugging Face causal LM in this process or a child, continuous batching, in-flight weight updates."""

    max_sequences: Positive = 64
    """Sequences decoded at once."""
    max_context: Natural = 0
    """Tokens of prompt and completion together; 0: what the model allows, at most 4096."""
    path: Literal["auto", "lean", "hf"] = "auto"
    """lean: fused forward for the Llama family; hf: the unmodified model; auto: lean where it applies."""


class Algo(_Section, frozen=True, kw_only=True):
    advantage: Literal["grpo", "rloo"] = "grpo"
    """Baseline of a reward: the mean of its group, or of the others of its group (leave one out)."""
    scale_rewards: Literal["group", "none"] = "group"
    """Divide a group's advantages by the standard deviation of its rewards (GRPO), or do not (Dr. GRPO)."""
    loss: Literal["grpo", "dr_grpo", "dapo"] = "dapo"
    """The clip objective's aggregation: mean of sequence means, fixed length, or mean over the step's tokens."""
    epsilon: Annotated[float, Meta(gt=0, lt=1)] = 0.2
    """Clip of the ratio below, 1 - epsilon."""
    epsilon_high: PositiveFloat | None = 0.28
    """Clip of the ratio above, 1 + epsilon_high. None: same as epsilon."""
    delta: Annotated[float, Meta(gt=1)] | None = 4.0
    """Dual clip: upper bound of the ratio where the advantage is negative. None: off."""
    beta: NonNegative = 0.0
    """Weight of the KL (k3) to the frozen initial model. 0: the reference is not loaded."""
    mask_truncated: bool = False
    """Withhold completions cut off by the budget from the loss; their reward stays in the baseline."""


class Learner(_Section, frozen=True, kw_only=True):
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


class Filter(_Section, frozen=True, kw_only=True):
    zero_variance: Literal["replace", "skip", "keep"] = "replace"
    """Groups whose rewards are all equal. replace: counted as filtered, another is admitted. skip: part of the step,
    with no forward pass, for their gradient is zero. keep: trained like any other."""
    tolerance: NonNegative = 1e-6
    """Rewards that differ by no more than this are equal."""
    patience: Positive = 20
    """End the run after this many batches' worth of filtered groups in a row."""


class Limits(_Section, frozen=True, kw_only=True):
    episode_s: Seconds = 600.0
    """Deadline of one episode's generation."""
    watchdog_s: Seconds = 900.0
    """End the run when nothing moved for this long."""
    failure_fraction: Fraction = 0.5
    """End the run when more than this part of the last failure_window attempts at one boundary failed."""
    failure_window: Positive = 64
    """Attempts, per boundary, that limits.failure_fraction looks at."""
    stop_s: Seconds = 10.0
    """Time the workers get to stop before they are killed."""


class Eval(_Section, frozen=True, kw_only=True):
    every: Natural = 10
    """Versions between evaluations on held-out prompts; 0: never."""
    prompts: Positive = 64
    """Held-out prompts, at most."""
    samples: Positive = 1
    """Completions of each."""
    temperature: NonNegative = 0.0
    """Of evaluation alone; 0: greedy."""
    deadline_s: Seconds = 600.0
    """Of one evaluation; what is not done by then is counted as lost."""


class Checkpoint(_Section, frozen=True, kw_only=True):
    every: Natural = 50
    """Steps; a multiple of sync.every. 0: only when stopped or at the end."""
    keep: Positive = 2
    """Complete checkpoints that are kept."""


class Observe(_Section, frozen=True, kw_only=True):
    samples: Natural = 4
    """Episodes a step written to samples.jsonl."""
    timeline: bool = True
    """Write timeline.jsonl."""


class RunConfig(_Section, frozen=True, kw_only=True):
    """The whole of a run."""

    run: Run = Run()
    model: Model = Model()
    prompts: Arithmetic | Jsonl = Arithmetic()
    reward: Reward = Reward()
    sampling: Sampling = Sampling()
    runtime: Inline | Procs = Procs()
    buffer: NoBuffer | Double | Window | Stream = Window()
    sync: Inproc | Shm = Shm()
    staleness: Staleness = Staleness()
    inflight: Swap | Recompute | Drain | Barrier = Swap()
    adapters: Full = Full()
    backend: Single = Single()
    engine: Embedded = Embedded()
    algo: Algo = Algo()
    learner: Learner = Learner()
    filter: Filter = Filter()
    limits: Limits = Limits()
    eval: Eval = Eval()
    checkpoint: Checkpoint = Checkpoint()
    observe: Observe = Observe()
