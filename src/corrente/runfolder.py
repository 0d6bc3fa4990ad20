"""The folder of a run: made once, never written over, and reopened only by the run it belongs to.

    runs/<name>/config.toml      the resolved config
                metrics.jsonl, timeline.jsonl, samples.jsonl, events.jsonl        (observe.jsonl)
                checkpoints/

A new run takes its name if that is free, and <name>-2, <name>-3, ... if it is not; making the folder is atomic, so two runs that
start at once do not share one. A run resumes in the folder its name says, with settings that may differ only in what does not
change which prompts it gets, or what a version and its bound mean.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from corrente import loading, schema
from corrente.config import RunConfig
from corrente.errors import ConfigError

CONFIG = "config.toml"
FIXED = (
    *("run.seed", "run.prompts_per_step", "run.group_size", "model.path", "sync.every"),
    *("prompts", "buffer", "staleness"),
)
"""Keys, or whole sections, that a resumed run keeps."""


def create(config: RunConfig) -> tuple[RunConfig, Path]:
    """Make a new folder and put the config into it. Returns the config, with the name it got, and the folder."""
    number, name = 1, config.run.name
    while True:
        folder = Path(config.run.dir) / name
        try:
            folder.mkdir(parents=True, exist_ok=False)
            break
        except FileExistsError:
            number += 1
            name = f"{config.run.name}-{number}"
    config = msgspec.structs.replace(config, run=msgspec.structs.replace(config.run, name=name))
    _write(folder, config)
    return config, folder


def reopen(config: RunConfig) -> Path:
    """The folder of the run that ``config`` goes on with. Raises ConfigError when there is none, or when it was another run."""
    folder = Path(config.run.dir) / config.run.name
    if not (folder / CONFIG).is_file():
        raise ConfigError(f"--resume: there is no run in {folder}; check run.name and run.dir, or leave out --resume")
    before = loading.load(folder / CONFIG)
    for key in FIXED:
        old, new = _value(before, key), _value(config, key)
        if old != new:
            raise ConfigError(
                f"--resume: {key} = {_shown(new)}, but the run in {folder} has {_shown(old)}; keep it, or start a run with "
                "another --name"
            )
    return folder


def keep(folder: Path, config: RunConfig) -> None:
    """Record the settings a resumed run goes on with."""
    _write(folder, config)


def _write(folder: Path, config: RunConfig) -> None:
    aside = folder / f".{CONFIG}.writing"
    aside.write_text(loading.dump(config), encoding="utf-8")
    aside.replace(folder / CONFIG)


def _value(config: RunConfig, key: str) -> object:
    section, _, leaf = key.partition(".")
    return getattr(getattr(config, section), leaf) if leaf else getattr(config, section)


def _shown(value: object) -> str:
    if not isinstance(value, msgspec.Struct):
        return schema.show(value)
    kind = schema.kind_of(value)
    return schema.show({**({"kind": kind} if kind else {}), **msgspec.structs.asdict(value)})
