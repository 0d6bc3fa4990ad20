"""Trackers that a config names, as sinks: numbers under TRL's names, the step's samples as a table.

    tensorboard    event files in <run folder>/tensorboard
    wandb          Weights & Biases: as the environment says, offline without a key; its files in <run folder>/wandb
    trackio        a local dashboard; its database where trackio keeps it ($TRACKIO_DIR)

Each runs beside the loop (``Beside``): one that fails, hangs or finds no network costs a warning and its own record. A library
that is not installed is refused before anything is loaded.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from corrente.config import RunConfig
from corrente.errors import ConfigError
from corrente.observe.background import Beside
from corrente.observe.base import Sink


class TrackerPlace(msgspec.Struct, frozen=True, kw_only=True):
    """What a tracker is told of a run. ``done``: steps taken before a resume. ``key`` is the same for every part of the run."""

    folder: Path
    project: str
    name: str
    config: dict[str, Any]
    done: int = 0

    @property
    def key(self) -> str:
        return hashlib.blake2b(str(self.folder.resolve()).encode(), digest_size=6).hexdigest()


MAKERS: Mapping[str, str] = {
    "tensorboard": "corrente.observe.tensorboard_sink:TensorboardSink",
    "wandb": "corrente.observe.wandb_sink:WandbSink",
    "trackio": "corrente.observe.trackio_sink:TrackioSink",
}


def check(config: RunConfig) -> None:
    """ConfigError for a tracker that is not installed, or named twice."""
    names = config.observe.trackers
    twice = [name for at, name in enumerate(names) if name in names[:at]]
    if twice:
        raise ConfigError(f"observe.trackers: {twice[0]!r} is there twice; name it once")
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(f'observe.trackers: {name} is not installed: pip install "corrente[{name}]"')


def open_trackers(config: RunConfig, folder: Path, *, done: int = 0) -> list[Beside]:
    """A sink for each of observe.trackers. ``folder``: of the run; ``done``: steps taken before a resume."""
    place = TrackerPlace(
        folder=folder,
        project=config.observe.project,
        name=config.observe.run_name or folder.name,
        config=msgspec.to_builtins(config),
        done=done,
    )
    return [Beside(_maker(name, place), name=name) for name in config.observe.trackers]


def _maker(name: str, place: TrackerPlace) -> Callable[[], Sink]:
    module, _, attribute = MAKERS[name].partition(":")
    return lambda: getattr(importlib.import_module(module), attribute)(place)


class Samples:
    """The samples of a step as rows, until the step's numbers come."""

    COLUMNS = ("step", "prompt", "completion", "reward")

    def __init__(self) -> None:
        self._rows: list[Mapping[str, Any]] = []

    def add(self, step: int, sample: Mapping[str, Any]) -> None:
        self._rows.append({"step": step, **sample})

    def take(self) -> tuple[list[str], list[list[Any]]]:
        """Columns and rows, which begin anew: prompt, completion, reward, each function's score, what functions logged."""
        rows, self._rows = self._rows, []
        more = list(dict.fromkeys(name for row in rows for name in _more(row)))
        return [*self.COLUMNS, *more], [
            [*(row.get(name) for name in self.COLUMNS), *(_more(row).get(name) for name in more)] for row in rows
        ]


def _more(row: Mapping[str, Any]) -> dict[str, Any]:
    return {**row.get("scores", {}), **row.get("extra", {})}
