"""The trackers that a config names, as sinks: numbers under TRL's names, the samples of a step as a table.

    tensorboard    event files in <run folder>/tensorboard
    wandb          Weights & Biases: as its environment variables say, offline without a key; its files in <run folder>/wandb
    trackio        a local dashboard; its database where trackio puts it ($TRACKIO_DIR)

Each runs in a background thread (``BackgroundSink``): one that fails, hangs or finds no network costs a warning and its own
record. A library that is not installed is refused before a model is loaded.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from corrente.common.plain_data import json_plain, safe_text
from corrente.config import RunConfig
from corrente.errors import ConfigError
from corrente.observe.background_sink import BackgroundSink
from corrente.observe.base import Sink


class TrackerRun(msgspec.Struct, frozen=True, kw_only=True):
    """The run as a tracker sees it. ``steps_done``: steps taken before a resume. ``key``: the same for all parts of a run."""

    folder: Path
    project: str
    name: str
    config: dict[str, Any]
    steps_done: int = 0

    @property
    def key(self) -> str:
        return hashlib.blake2b(str(self.folder.resolve()).encode(), digest_size=6).hexdigest()


MAKERS: Mapping[str, str] = {
    "tensorboard": "corrente.observe.tensorboard_sink:TensorboardSink",
    "wandb": "corrente.observe.wandb_sink:WandbSink",
    "trackio": "corrente.observe.trackio_sink:TrackioSink",
}


def check(config: RunConfig) -> None:
    """Raise ConfigError for a tracker that is not installed or named twice."""
    names = config.observe.trackers
    twice = [name for at, name in enumerate(names) if name in names[:at]]
    if twice:
        raise ConfigError(f"observe.trackers: {twice[0]!r} is there twice; name it once")
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(f'observe.trackers: {name} is not installed: pip install "corrente[{name}]"')


def open_trackers(config: RunConfig, folder: Path, *, done: int = 0) -> list[BackgroundSink]:
    """Open a sink for each of ``observe.trackers``. ``folder``: the run folder; ``done``: steps taken before a resume."""
    place = TrackerRun(
        folder=folder,
        project=config.observe.project,
        name=config.observe.run_name or folder.name,
        config=msgspec.to_builtins(config),
        steps_done=done,
    )
    return [BackgroundSink(_sink_maker(name, place), name=name) for name in config.observe.trackers]


def _sink_maker(name: str, place: TrackerRun) -> Callable[[], Sink]:
    module, _, attribute = MAKERS[name].partition(":")
    return lambda: getattr(importlib.import_module(module), attribute)(place)


class SampleTable:
    """Collects the samples of a step until the step's metrics arrive."""

    COLUMNS = ("step", "prompt", "completion", "reward")

    def __init__(self) -> None:
        self._rows: list[Mapping[str, Any]] = []

    def add_sample(self, step: int, sample: Mapping[str, Any]) -> None:
        self._rows.append({"step": step, **sample})

    def take_rows(self) -> tuple[list[str], list[list[Any]]]:
        """Return the columns and rows collected so far, and start anew.

        Columns: step, prompt, completion, reward, the score of each function, the values that functions logged.
        """
        rows, self._rows = self._rows, []
        more = list(dict.fromkeys(name for row in rows for name in _extra_columns(row)))
        return [*self.COLUMNS, *more], [
            list(map(_cell, [*map(row.get, self.COLUMNS), *map(_extra_columns(row).get, more)])) for row in rows
        ]


def _cell(value: Any) -> Any:
    """The value as trackers take it: integers of more than 64 bits are their text."""
    return value if not isinstance(value, int) or abs(value) < 2**63 else safe_text(json_plain(value))


def _extra_columns(row: Mapping[str, Any]) -> dict[str, Any]:
    return {**row.get("scores", {}), **row.get("extra", {})}
