"""Going on with a run of OUTPUT_DIR: what it keeps of how it began, and what a trainer that resumes it may say otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec

from corrente.config import Full, RunConfig
from corrente.config.load import load_config
from corrente.config.paths import map_paths
from corrente.entrypoints import run_folder
from corrente.errors import ConfigError
from corrente.trl.weights import put_aside


def resumed(config: RunConfig, start: Path, output: Path) -> RunConfig:
    """``config`` as that of the run that checkpoint ``start`` is of. ConfigError for what a resumed run cannot change.

    Weights that trainers have written below ``output``, which the run began with, are taken over where they are still there:
    those of an earlier train(), and a loaded model's copy. Otherwise model and adapter have to be the same, wherever they lie.
    """
    folder = start.parents[1]
    before = _moved(load_config(folder / run_folder.CONFIG), output)
    config = msgspec.structs.replace(
        config, run=msgspec.structs.replace(config.run, dir=str(folder.parent), name=folder.name)
    )
    init = "" if isinstance(before.adapters, Full) else before.adapters.init
    if _below(init, output) and not isinstance(config.adapters, Full):
        config = msgspec.structs.replace(config, adapters=msgspec.structs.replace(config.adapters, init=init))
    began = msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, path=before.model.path))
    own = _below(before.model.path, output) and Path(before.model.path).is_dir()
    with _in_trl_terms():
        run_folder.reopen(began if own else config)
    return began if own else config


@contextmanager
def held(folder: Path, config: RunConfig, *, start: Path | None) -> Iterator[None]:
    """Hold the run's folder. If it goes on from ``start``, what was written after that is put aside, or taken back."""
    with ExitStack() as stack:
        with _in_trl_terms():
            stack.enter_context(run_folder.held(folder))
        if start is not None:
            put_aside(start)
            run_folder.keep(folder, config)
        yield


@contextmanager
def _in_trl_terms() -> Iterator[None]:
    """Faults of resuming name the options of a command line, which a script does not have."""
    try:
        yield
    except ConfigError as error:
        text = str(error).replace("resume:", "resume_from_checkpoint:", 1).replace("run.name", "run_name")
        raise ConfigError(text) from None


def _moved(before: RunConfig, output: Path) -> RunConfig:
    """``before`` with the paths below its OUTPUT_DIR in ``output``, to which that has been renamed since."""
    old = Path(before.run.dir).parent

    def move(path: str) -> str:
        return str(output / Path(path).relative_to(old)) if Path(path).is_relative_to(old) else path

    return map_paths(before, move) if old.is_absolute() and old != output else before


def _below(path: str, folder: Path) -> bool:
    return bool(path) and Path(path).resolve().is_relative_to(folder.resolve())
