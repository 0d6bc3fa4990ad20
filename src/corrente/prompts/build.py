"""Build the training prompts and the held-out prompts from a config and from the datasets that a program passes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import msgspec

from corrente.config import Arithmetic, Dataset, GivenRows, Jsonl, Mixture, Parquet, ReasoningGym, RunConfig, Seeds
from corrente.config.prompts import ArithmeticSource, JsonlSource, ParquetSource
from corrente.data.types import Prompt
from corrente.errors import ConfigError
from corrente.prompts import dataset
from corrente.prompts.arithmetic import ArithmeticPrompts, held_out_prompts
from corrente.prompts.base import ChatEncoder, Encode, Prompts
from corrente.prompts.dataset import RowStream
from corrente.prompts.jsonl import JsonlTable
from corrente.prompts.mixture import MixturePrompts, MixtureSource, label_source
from corrente.prompts.reasoning_gym import ReasoningGymPrompts, held_out_tasks
from corrente.prompts.rows import RowReader, StreamPrompts, Table, TablePrompts, first_rows
from corrente.prompts.seeds import SeedPrompts, held_out_seeds

RowSection = Jsonl | Parquet | Dataset | GivenRows
"""Sections whose prompts are rows of data."""
ProceduralSection = Arithmetic | Seeds | ReasoningGym
"""Sections whose prompts are generated, without end."""
PROCEDURAL_MAKERS: Mapping[type, tuple[Any, Any]] = {
    Arithmetic: (ArithmeticPrompts, held_out_prompts),
    Seeds: (SeedPrompts, held_out_seeds),
    ReasoningGym: (ReasoningGymPrompts, held_out_tasks),
}
"""The class for training prompts and the function for held-out prompts, by section."""


class PromptBuilder:
    """Builds the prompts of single sources. ``chat`` renders conversations. ``environments`` and ``opens``: see RowReader."""

    def __init__(
        self,
        config: RunConfig,
        encode: Encode,
        *,
        chat: ChatEncoder | None = None,
        environments: Collection[str] | None = None,
        opens: bool = False,
    ) -> None:
        self._config, self._encode, self._chat = config, encode, chat
        self._environments, self._opens = environments, opens

    def build_source(self, section: ProceduralSection | RowSection, passed_dataset: Any) -> Prompts:
        """The training prompts of one source; ``passed_dataset``: the dataset that the program passed, if any."""
        seed = self._config.run.seed
        if isinstance(section, ProceduralSection):
            return _procedural_makers(section)[0](section, self._encode, seed=seed)
        rows, reader = _open_rows(section, passed_dataset), self._row_reader(section, _source_title(section))
        if not isinstance(rows, RowStream):
            return TablePrompts(rows, reader, epochs=section.epochs, shuffle=section.shuffle, seed=seed)
        assert isinstance(section, Dataset | GivenRows)
        window = section.shuffle_window if section.shuffle else 1
        return StreamPrompts(rows.open_epoch, reader, epochs=section.epochs, window=window, seed=seed)

    def build_held_out(
        self, section: ProceduralSection | RowSection, passed_dataset: Any, *, count: int
    ) -> tuple[Prompt, ...]:
        """At most ``count`` held-out prompts of one source; none where it holds out nothing."""
        if not count:
            return ()
        if isinstance(section, ProceduralSection):
            return _procedural_makers(section)[1](section, self._encode, count=count)
        rows = _open_held_out_rows(section, passed_dataset)
        if rows is None:
            return ()
        reader = self._row_reader(section, f"the held-out rows of {_source_title(section)}")
        return tuple(reader.make_prompt(f"eval/{at}", row) for at, row in first_rows(rows, count=count))

    def _row_reader(self, section: RowSection, name: str) -> RowReader:
        return RowReader(
            self._encode,
            column=section.column,
            name=name,
            chat=self._chat,
            environments=self._environments,
            opens=self._opens,
            max_tokens=section.max_prompt_tokens,
        )


def build_prompts(
    config: RunConfig,
    encode: Encode,
    *,
    chat: ChatEncoder | None = None,
    passed_dataset: Any = None,
    environments: Collection[str] | None = None,
    opens: bool = False,
) -> Prompts:
    """Build the training prompts. ConfigError for data that cannot be read.

    ``passed_dataset``: a dataset that replaces the one ``config.prompts`` names, and is read in the order and epochs set there.
    ``environments`` and ``opens``: see RowReader.
    """
    section = prompts_section(config, passed_dataset)
    builder = PromptBuilder(config, encode, chat=chat, environments=environments, opens=opens)
    if not isinstance(section, Mixture):
        return builder.build_source(section, passed_dataset)
    parts = [
        MixtureSource(
            name=source_name(source),
            prompts=builder.build_source(source, None),
            weight=source.weight,
            weight_end=source.weight_end,
        )
        for source in section.sources
    ]
    return MixturePrompts(parts, seed=config.run.seed, length=config.run.steps * config.run.prompts_per_step)


def build_eval_prompts(
    config: RunConfig,
    encode: Encode,
    *,
    chat: ChatEncoder | None = None,
    passed_dataset: Any = None,
    environments: Collection[str] | None = None,
    opens: bool = False,
) -> tuple[Prompt, ...]:
    """Build the held-out prompts, at most ``eval.prompts``; none when evaluation is off or the dataset has none.

    The sources of ``eval.sources`` or of a mixture, and several datasets ``passed_dataset`` as a dict, have equal shares.
    """
    if not config.eval.every:
        return ()
    section = prompts_section(config, passed_dataset)
    builder = PromptBuilder(config, encode, chat=chat, environments=environments, opens=opens)
    if isinstance(passed_dataset, Mapping) and passed_dataset:
        parts = [(str(name), section, dataset_) for name, dataset_ in passed_dataset.items()]
    elif passed_dataset is None and config.eval.sources:
        parts = [(source_name(source), _as_eval_source(source), None) for source in config.eval.sources]
    elif isinstance(section, Mixture):
        parts = [(source_name(source), source, None) for source in section.sources]
    else:
        return builder.build_held_out(section, passed_dataset, count=config.eval.prompts)
    each, left = divmod(config.eval.prompts, len(parts))
    return tuple(
        label_source(name, prompt)
        for at, (name, source, dataset_) in enumerate(parts)
        for prompt in builder.build_held_out(source, dataset_, count=each + (at < left))
    )


def _as_eval_source(
    source: ArithmeticSource | JsonlSource | ParquetSource,
) -> ArithmeticSource | JsonlSource | ParquetSource:
    """Read all rows of an evaluation source that names no file for evaluation."""
    if isinstance(source, ArithmeticSource) or source.eval_path:
        return source
    return msgspec.structs.replace(source, eval_path=source.path)


def source_name(source: ArithmeticSource | JsonlSource | ParquetSource) -> str:
    """The name of a source, as prompt ids have it."""
    return source.name or ("arithmetic" if isinstance(source, ArithmeticSource) else Path(source.path).stem)


def _procedural_makers(section: ProceduralSection) -> tuple[Any, Any]:
    return next(makers for kind, makers in PROCEDURAL_MAKERS.items() if isinstance(section, kind))


def prompts_section(config: RunConfig, passed_dataset: Any) -> Any:
    """The prompts section; for a dataset that the program passed, a GivenRows section with the same order and epochs."""
    section = config.prompts
    if passed_dataset is None or isinstance(section, GivenRows):
        return section
    if isinstance(section, Jsonl | Parquet | Dataset):
        return GivenRows(column=section.column, epochs=section.epochs, shuffle=section.shuffle)
    return GivenRows()


def _open_rows(section: RowSection, passed_dataset: Any) -> Table | RowStream:
    match section:
        case Jsonl():
            return JsonlTable(Path(section.path), key="prompts.path", column=section.column)
        case Parquet():
            return dataset.open_parquet(section.path, key="prompts.path")
        case Dataset():
            return dataset.load_hub_dataset(section, section.split)
        case GivenRows():
            if passed_dataset is None:
                raise ConfigError(
                    'prompts.kind = "given": no dataset was given; a config file alone cannot bring one '
                    "(RunInputs.train_dataset, in Python)"
                )
            return dataset.wrap_dataset(passed_dataset, name="train_dataset")


def _open_held_out_rows(section: RowSection, passed_dataset: Any) -> Table | RowStream | None:
    match section:
        case GivenRows():
            return None if passed_dataset is None else dataset.wrap_dataset(passed_dataset, name="eval_dataset")
        case Dataset():
            return dataset.load_hub_dataset(section, section.eval_split) if section.eval_split else None
        case _ if not section.eval_path:
            return None
        case Jsonl():
            return JsonlTable(Path(section.eval_path), key="prompts.eval_path", column=section.column)
        case Parquet():
            return dataset.open_parquet(section.eval_path, key="prompts.eval_path")


def _source_title(section: RowSection) -> str:
    return "train_dataset" if isinstance(section, GivenRows) else section.path
