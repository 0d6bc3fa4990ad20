"""From a config's ``prompts`` section, and what a program brings, to where work comes from, and to what is held out."""

from __future__ import annotations

from collections.abc import Mapping
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
from corrente.prompts.jsonl import RowFile
from corrente.prompts.mixture import MixturePrompts, Part, labelled
from corrente.prompts.reasoning_gym import ReasoningGymPrompts, held_out_tasks
from corrente.prompts.rows import Reader, StreamPrompts, Table, TablePrompts, first_rows
from corrente.prompts.seeds import SeedPrompts, held_out_seeds

Rows = Jsonl | Parquet | Dataset | GivenRows
"""Kinds whose prompts are rows."""
Drawn = Arithmetic | Seeds | ReasoningGym
"""Kinds whose prompts are made, without end."""
DRAWN: Mapping[type, tuple[Any, Any]] = {
    Arithmetic: (ArithmeticPrompts, held_out_prompts),
    Seeds: (SeedPrompts, held_out_seeds),
    ReasoningGym: (ReasoningGymPrompts, held_out_tasks),
}
"""What makes them, for training and for evaluation."""


class Builder:
    """Makes prompts for ``config``. ``chat`` renders those that are conversations."""

    def __init__(self, config: RunConfig, encode: Encode, *, chat: ChatEncoder | None = None) -> None:
        self._config, self._encode, self._chat = config, encode, chat

    def source(self, section: Drawn | Rows, brought: Any) -> Prompts:
        """The prompts of one source."""
        seed = self._config.run.seed
        if isinstance(section, Drawn):
            return _drawn(section)[0](section, self._encode, seed=seed)
        rows, reader = _rows(section, brought), self._reader(section, _shown(section))
        if not isinstance(rows, RowStream):
            return TablePrompts(rows, reader, epochs=section.epochs, shuffle=section.shuffle, seed=seed)
        assert isinstance(section, Dataset | GivenRows)
        window = section.shuffle_window if section.shuffle else 1
        return StreamPrompts(rows.begin, reader, epochs=section.epochs, window=window, seed=seed)

    def held_out(self, section: Drawn | Rows, brought: Any, *, count: int) -> tuple[Prompt, ...]:
        """At most ``count`` prompts of what a source keeps for evaluation."""
        if not count:
            return ()
        if isinstance(section, Drawn):
            return _drawn(section)[1](section, self._encode, count=count)
        rows = _held_out_rows(section, brought)
        if rows is None:
            return ()
        reader = self._reader(section, f"the held-out rows of {_shown(section)}")
        return tuple(reader.make(f"eval/{at}", row) for at, row in first_rows(rows, count=count))

    def _reader(self, section: Rows, name: str) -> Reader:
        return Reader(self._encode, column=section.column, name=name, chat=self._chat)


def build(config: RunConfig, encode: Encode, *, chat: ChatEncoder | None = None, brought: Any = None) -> Prompts:
    """The training prompts. ``brought``: a dataset in place of what ``config.prompts`` names, whose order and epochs it gets."""
    builder, section = Builder(config, encode, chat=chat), prompts_section(config, brought)
    if not isinstance(section, Mixture):
        return builder.source(section, brought)
    parts = [
        Part(
            name=name_of(source),
            prompts=builder.source(source, None),
            weight=source.weight,
            weight_end=source.weight_end,
        )
        for source in section.sources
    ]
    return MixturePrompts(parts, seed=config.run.seed, length=config.run.steps * config.run.prompts_per_step)


def build_eval(
    config: RunConfig, encode: Encode, *, chat: ChatEncoder | None = None, brought: Any = None
) -> tuple[Prompt, ...]:
    """The held-out prompts, at most ``eval.prompts``; none when evaluation is off or the dataset has none. Of eval.sources, of a
    mixture, and of several datasets ``brought`` under names, each has an equal share."""
    if not config.eval.every:
        return ()
    builder, section = Builder(config, encode, chat=chat), prompts_section(config, brought)
    if isinstance(brought, Mapping) and brought:
        parts = [(str(name), section, dataset_) for name, dataset_ in brought.items()]
    elif brought is None and config.eval.sources:
        parts = [(name_of(source), _evaluated(source), None) for source in config.eval.sources]
    elif isinstance(section, Mixture):
        parts = [(name_of(source), source, None) for source in section.sources]
    else:
        return builder.held_out(section, brought, count=config.eval.prompts)
    each, left = divmod(config.eval.prompts, len(parts))
    return tuple(
        labelled(name, prompt)
        for at, (name, source, dataset_) in enumerate(parts)
        for prompt in builder.held_out(source, dataset_, count=each + (at < left))
    )


def _evaluated(
    source: ArithmeticSource | JsonlSource | ParquetSource,
) -> ArithmeticSource | JsonlSource | ParquetSource:
    """A source of eval.sources: all of a file that names no rows for evaluation."""
    if isinstance(source, ArithmeticSource) or source.eval_path:
        return source
    return msgspec.structs.replace(source, eval_path=source.path)


def name_of(source: ArithmeticSource | JsonlSource | ParquetSource) -> str:
    """What a source is called in ids."""
    return source.name or ("arithmetic" if isinstance(source, ArithmeticSource) else Path(source.path).stem)


def _drawn(section: Drawn) -> tuple[Any, Any]:
    return next(makers for kind, makers in DRAWN.items() if isinstance(section, kind))


def prompts_section(config: RunConfig, brought: Any) -> Any:
    """The section, or with a dataset that was ``brought`` its settings: ``prompts`` of kind given, in order and epochs."""
    section = config.prompts
    if brought is None or isinstance(section, GivenRows):
        return section
    if isinstance(section, Jsonl | Parquet | Dataset):
        return GivenRows(column=section.column, epochs=section.epochs, shuffle=section.shuffle)
    return GivenRows()


def _rows(section: Rows, brought: Any) -> Table | RowStream:
    match section:
        case Jsonl():
            return RowFile(Path(section.path), key="prompts.path", column=section.column)
        case Parquet():
            return dataset.parquet(section.path, key="prompts.path")
        case Dataset():
            return dataset.hub(section, section.split)
        case GivenRows():
            if brought is None:
                raise ConfigError(
                    'prompts.kind = "given": no dataset was given; a config file alone cannot bring one '
                    "(RunInputs.train_dataset, in Python)"
                )
            return dataset.given(brought, name="train_dataset")


def _held_out_rows(section: Rows, brought: Any) -> Table | RowStream | None:
    match section:
        case GivenRows():
            return None if brought is None else dataset.given(brought, name="eval_dataset")
        case Dataset():
            return dataset.hub(section, section.eval_split) if section.eval_split else None
        case _ if not section.eval_path:
            return None
        case Jsonl():
            return RowFile(Path(section.eval_path), key="prompts.eval_path", column=section.column)
        case Parquet():
            return dataset.parquet(section.eval_path, key="prompts.eval_path")


def _shown(section: Rows) -> str:
    return "train_dataset" if isinstance(section, GivenRows) else section.path
