"""The folder of a run: made once, never written over, and reopened only by the run it belongs to.

    runs/<name>/config.toml      the resolved config
                inputs.json      what model and data files it began with (identity.py)
                metrics.jsonl, timeline.jsonl, samples.jsonl, events.jsonl        (observe.jsonl)
                logs/                                                             what workers wrote, a file each
                checkpoints/

A new run takes its name if that is free, and <name>-2, <name>-3, ... if it is not; making the folder is atomic, so two runs that
start at once do not share one. A run resumes in the folder its name says, with settings that may differ only in what does not
change which prompts it gets, or what a version and its bound mean.
"""

from __future__ import annotations

import fcntl
import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from corrente.config import RunConfig, schema
from corrente.config.load import dump_config, load_config, parse_config
from corrente.config.paths import PATH_FIELDS
from corrente.controller import checkpoint_folder
from corrente.data.checkpoint_names import CHECKPOINTS
from corrente.entrypoints.identity import RunIdentity, identify, read_identity, write_identity
from corrente.errors import ConfigError
from corrente.observe import jsonl

CONFIG = "config.toml"
LOGS = "logs"
FIXED = (
    *("run.seed", "run.prompts_per_step", "run.group_size", "model.path", "sync.every"),
    *("prompts", "chat", "buffer", "staleness", "adapters"),
)
"""Keys, or whole sections, that a resumed run keeps; of ``prompts`` all but how often they are repeated."""


def run_folder_path(config: RunConfig) -> Path:
    """The folder a run writes to: run.dir / run.name."""
    return Path(config.run.dir) / config.run.name


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
        except OSError as error:
            raise ConfigError(
                f"run.dir = {config.run.dir!r}: no folder can be made there ({error.strerror}); name one that can be written to"
            ) from error
    config = msgspec.structs.replace(config, run=msgspec.structs.replace(config.run, name=name))
    _write(folder, config)
    return config, folder


def reopen(config: RunConfig) -> Path:
    """The folder of the run that ``config`` goes on with. Raises ConfigError when there is none, or when it was another run."""
    folder = Path(config.run.dir) / config.run.name
    if not (folder / CONFIG).is_file():
        raise ConfigError(f"resume: there is no run in {folder}; check run.name and run.dir, or begin a new run")
    before, now = load_config(folder / CONFIG), parse_config(tomllib.loads(dump_config(config)))
    began = read_identity(folder)
    given = RunIdentity() if began is None else identify(now)
    for key in FIXED:
        old, new = _value(before, key), _value(now, key)
        if key == "model.path" and began is not None and began.model is not None and given.model is not None:
            if difference := began.model.difference(given.model):
                raise ConfigError(
                    f"resume: model.path = {schema.show(new)}: {difference} ({schema.show(old)}, in {folder}); give the "
                    "model that the run began with, or begin a run of another run.name"
                )
        elif old != _as_before(key, old, new, {} if began is None else began.files, given.files):
            raise ConfigError(
                f"resume: {key} = {schema.show(new)}, but the run in {folder} has {schema.show(old)}; keep it, or begin a run of "
                "another run.name"
            )
    return folder


def begin(folder: Path, config: RunConfig) -> None:
    """Record what a new run begins with, so that a resumed one can tell whether it is given the same."""
    write_identity(folder, identify(config))


def located(config: RunConfig, file: Path, *, said: Sequence[str] = ()) -> RunConfig:
    """``config``, read from ``file``, as that of the run whose folder the file is in, wherever the folder has been moved.

    ``said``: overrides of the command line; where they name a folder, it is theirs. A file that is in no run's folder changes
    nothing.
    """
    folder = file.absolute().parent
    if (
        file.name != CONFIG
        or not (folder / CHECKPOINTS).is_dir()
        or any(o.startswith(("run.dir", "run.name")) for o in said)
    ):
        return config
    run = msgspec.structs.replace(config.run, dir=str(folder.parent), name=folder.name)
    return msgspec.structs.replace(config, run=run)


def keep(folder: Path, config: RunConfig) -> None:
    """Record the settings a resumed run goes on with, and take back what was recorded after the checkpoint it goes on from."""
    _write(folder, config)
    newest = checkpoint_folder.latest(folder / CHECKPOINTS)
    if newest is None:
        return
    snapshot = checkpoint_folder.read(newest)
    evaluated = snapshot.evaluated >= snapshot.version
    jsonl.rewind_records(folder, step=snapshot.step, evaluated=evaluated, elapsed_s=snapshot.elapsed_s)


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Hold the folder while a run goes on in it; whoever is killed holds it no longer. Raises ConfigError when another does."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"resume: the run in {folder} is still going on; wait for its end, or stop it") from None
        except OSError:
            pass  # a file system without locks
        yield
    finally:
        os.close(handle)


def resume_command(folder: Path) -> str:
    """The command that goes on with the run in ``folder``."""
    return f"corrente run {folder / CONFIG} --resume"


def _write(folder: Path, config: RunConfig) -> None:
    aside = folder / f".{CONFIG}.writing"
    aside.write_text(dump_config(config), encoding="utf-8")
    aside.replace(folder / CONFIG)


def _as_before(key: str, old: Any, new: Any, began: Mapping[str, str], given: Mapping[str, str]) -> Any:
    """``new`` with the paths of ``old`` where they name the same place, or files with the same content."""

    def settle(name: str, before: Any, now: Any) -> Any:
        if not (isinstance(before, str) and isinstance(now, str) and before and now):
            return now
        digest = began.get(name)
        same = Path(before).absolute() == Path(now).absolute() or (digest is not None and digest == given.get(name))
        return before if same else now

    if isinstance(old, str):
        return settle(key, old, new)
    if isinstance(old, dict) and isinstance(new, dict):
        return {name: settle(f"{key}.{name}", old.get(name), value) for name, value in new.items()}
    fields = getattr(new, "__struct_fields__", ())
    paths = {f: settle(f"{key}.{f}", getattr(old, f, None), getattr(new, f)) for f in fields if f in PATH_FIELDS}
    return msgspec.structs.replace(new, **paths) if paths else new


def _value(config: RunConfig, key: str) -> object:
    section, _, leaf = key.partition(".")
    if key == "prompts":
        fixed = {name: value for name, value in msgspec.structs.asdict(config.prompts).items() if name != "epochs"}
        return {"kind": schema.kind_of(config.prompts), **fixed}
    return getattr(getattr(config, section), leaf) if leaf else getattr(config, section)
