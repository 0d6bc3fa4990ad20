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
    dir: str = "runs"
    seed: Natural = 0
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
    shots: Natural = 2
    held_out: Annotated[float, Meta(gt=0, lt=1)] = 0.2


class Jsonl(_Kind, frozen=True, kw_only=True, tag="jsonl"):
    """One JSON object a line; ``column`` is the prompt text, the other columns reach the reward functions."""

    path: str
    column: str = "prompt"
    eval_path: str = ""
    epochs: Natural = 1
    """0: repeat for ever."""
    shuffle: bool = True


class Reward(_Section, frozen=True, kw_only=True):
    functions: tuple[str, ...] = ("exact_line",)
    """Built-in names, "package.module:function", or "path/to/file.py:function"."""
    weights: tuple[float, ...] = ()
    """One per function; empty: all 1."""
    deadline_s: Seconds = 30.0


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
    retries: Natural = 3


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
    scale_rewards: Literal["group", "none"] = "group"
    """Divide a group's advantages by the standard deviation of its rewards (GRPO), or do not (Dr. GRPO)."""
    loss: Literal["grpo", "dr_grpo", "dapo"] = "dapo"
    """The clip objective's aggregation: mean of sequence means, fixed length, or mean over the step's tokens."""
    epsilon: Annotated[float, Meta(gt=0, lt=1)] = 0.2
    epsilon_high: PositiveFloat | None = 0.28
    """None: same as epsilon."""
    delta: Annotated[float, Meta(gt=1)] | None = 4.0
    """Dual clip: upper bound of the ratio where the advantage is negative. None: off."""
    beta: NonNegative = 0.0
    """Weight of the KL (k3) to the frozen initial model. 0: the reference is not loaded."""
    mask_truncated: bool = False
    """Withhold completions cut off by the budget from the loss; their reward stays in the baseline."""


class Learner(_Section, frozen=True, kw_only=True):
    lr: PositiveFloat = 1e-5
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: Natural = 0
    weight_decay: NonNegative = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: PositiveFloat = 1e-8
    max_grad_norm: NonNegative = 1.0
    """0: no clipping."""
    micro_batch_tokens: Positive = 2048
    """Distinct tokens of one forward pass; does not change the gradient."""
    gradient_checkpointing: bool = False


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
    stop_s: Seconds = 10.0
    """Time the workers get to stop before they are killed."""


class Eval(_Section, frozen=True, kw_only=True):
    every: Natural = 10
    """Versions between evaluations on held-out prompts; 0: never."""
    prompts: Positive = 64
    samples: Positive = 1
    temperature: NonNegative = 0.0
    deadline_s: Seconds = 600.0


class Checkpoint(_Section, frozen=True, kw_only=True):
    every: Natural = 50
    """Steps; a multiple of sync.every. 0: only when stopped or at the end."""
    keep: Positive = 2


class Observe(_Section, frozen=True, kw_only=True):
    samples: Natural = 4
    """Episodes a step written to samples.jsonl."""
    timeline: bool = True


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
