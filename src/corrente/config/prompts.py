"""Sources of prompts: the kinds of ``prompts`` in a config. Their code is in prompts/."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from corrente.config.section import Kind, Natural, NonNegative, Positive, Section


class Arithmetic(Kind, frozen=True, kw_only=True, tag="arithmetic"):
    """Sums of two numbers behind worked examples, drawn without end; a part of all pairs is held out for evaluation."""

    digits: Annotated[int, Meta(ge=1, le=6)] = 1
    """Of both numbers."""
    shots: Natural = 2
    """Worked examples before each sum."""
    held_out: Annotated[float, Meta(gt=0, lt=1)] = 0.2
    """Part of all pairs that is never trained on, in either order."""


class _Rows(Kind, frozen=True, kw_only=True):
    column: str = "prompt"
    """The column with the prompt, in every row: text, or a list of messages, which the chat template renders."""
    epochs: Natural = 1
    """0: repeat for ever."""
    shuffle: bool = True
    """Another order each epoch, from run.seed; false: the order they are in."""
    max_prompt_tokens: Natural = 0
    """Of a longer prompt the last so many tokens are kept, for plain completions; 0: all."""


class Jsonl(_Rows, frozen=True, kw_only=True, tag="jsonl"):
    """One JSON object a line; ``column`` is the prompt, the other columns reach the reward functions."""

    path: str
    """A JSON Lines file."""
    eval_path: str = ""
    """Rows for evaluation; empty: no evaluation."""


class Parquet(_Rows, frozen=True, kw_only=True, tag="parquet"):
    """A Parquet file, or a folder of them; ``column`` is the prompt, the other columns reach the reward functions."""

    path: str
    """A Parquet file, or a folder of them, in order of their names."""
    eval_path: str = ""
    """Rows for evaluation; empty: no evaluation."""


class _Streamed(_Rows, frozen=True, kw_only=True):
    shuffle_window: Positive = 1000
    """Of a stream, rows held in memory, from which the next is drawn; what can be indexed is shuffled whole."""


class Dataset(_Streamed, frozen=True, kw_only=True, tag="dataset"):
    """A dataset of the Hugging Face hub or in their layout on disk, read by their datasets library."""

    path: str
    """Its name on the hub, or a folder: of data files, or written by save_to_disk."""
    name: str = ""
    """The configuration, where there are several."""
    split: str = "train"
    """What is trained on; slices, such as "train[:90%]", too."""
    eval_split: str = ""
    """What is evaluated on; empty: no evaluation."""
    revision: str = ""
    """A commit, branch or tag on the hub; empty: the newest."""
    streaming: bool = False
    """Read rows as they are needed, and download nothing else. A resumed run reads again what it had read of the epoch."""


class GivenRows(_Streamed, frozen=True, kw_only=True, tag="given"):
    """A data set that a program passes as an object (RunInputs.train_dataset); a config file alone cannot."""


class Seeds(Kind, frozen=True, kw_only=True, tag="seeds"):
    """Numbers without end, for environments that make a task of their own out of a seed; those of evaluation are others."""

    text: str = ""
    """What the policy reads before the environment says anything; empty: nothing."""


class ReasoningGym(Kind, frozen=True, kw_only=True, tag="reasoning_gym"):
    """Tasks of the package reasoning-gym, drawn without end; the reward function "reasoning_gym" judges answers to them."""

    tasks: tuple[str, ...]
    """Names of its datasets, like "leg_counting"; each prompt is of one of them."""
    weights: tuple[NonNegative, ...] = ()
    """How often each is drawn, one per task; empty: all alike."""
    options: dict[str, dict[str, Any]] = msgspec.field(default_factory=dict[str, dict[str, Any]])
    """Parameters of a dataset, by task: [prompts.options.leg_counting] max_animals = 4."""
    template: str = "{question}\nGive the final answer between <answer> and </answer>.\n"
    """What the policy reads; {question} is filled in."""


class ArithmeticSource(Arithmetic, frozen=True, kw_only=True, tag="arithmetic"):
    """Sums, as one source of a mixture."""

    name: str = "arithmetic"
    """Begins the ids of its prompts, and is their column "source"."""
    weight: NonNegative = 1.0
    """Of its share in the prompts at the beginning of the run."""
    weight_end: NonNegative | None = None
    """Of its share at the end of the run, changing evenly in between. None: weight."""


class JsonlSource(Jsonl, frozen=True, kw_only=True, tag="jsonl"):
    """A JSON Lines file, as one source of a mixture; once its epochs are over the others share what was its."""

    name: str = ""
    """Begins the ids of its prompts, and is their column "source"; empty: the file's name without its ending."""
    weight: NonNegative = 1.0
    """Of its share in the prompts at the beginning of the run."""
    weight_end: NonNegative | None = None
    """Of its share at the end of the run, changing evenly in between. None: weight."""


class ParquetSource(Parquet, frozen=True, kw_only=True, tag="parquet"):
    """Parquet files, as one source of a mixture."""

    name: str = ""
    """Begins the ids of its prompts, and is their column "source"; empty: the file's name without its ending."""
    weight: NonNegative = 1.0
    """Of its share in the prompts at the beginning of the run."""
    weight_end: NonNegative | None = None
    """Of its share at the end of the run, changing evenly in between. None: weight."""


class Mixture(Kind, frozen=True, kw_only=True, tag="mixture"):
    """Several sources, drawn from by weight; weights may change over the run, which makes it a curriculum."""

    sources: tuple[ArithmeticSource | JsonlSource | ParquetSource, ...]
    """[[prompts.sources]] tables, each with a kind. The run's prompts end when those of all sources have."""


class Chat(Section, frozen=True, kw_only=True):
    """How conversations become what the model reads; prompts that are plain text are read as they are."""

    template: str = ""
    """A Jinja template, or a file with one; empty: the one that comes with the model's tokenizer."""
    template_kwargs: dict[str, Any] = msgspec.field(default_factory=dict[str, Any])
    """What the template is told beside messages and tools, such as enable_thinking = false."""
    system: str = ""
    """System message of conversations that bring none; empty: what the template does then."""
