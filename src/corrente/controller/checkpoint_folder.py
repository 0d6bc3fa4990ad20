"""Atomic checkpoints: written aside, flushed, marked, renamed. A folder without the marker is not a checkpoint.

    <folder>/step-000050/control.msgpack     step, version, ledger, finished groups, dataset position
    <folder>/step-000050/learner/            model, optimizer, scheduler, RNG (a Hugging Face directory, and more)
    <folder>/step-000050/COMMIT              written last

A crash, or a full disk, at any point leaves the earlier checkpoints as they were.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import msgspec

from corrente.common import serialization
from corrente.controller.snapshot import Snapshot
from corrente.data.checkpoint_names import LEARNER, checkpoint_name, step_of_checkpoint
from corrente.errors import CheckpointError
from corrente.learner.base import Learner

MARKER = "COMMIT"
CONTROL = "control.msgpack"


class CheckpointFolder:
    """Implements parts.Checkpoints in a folder; the newest ``keep`` are kept."""

    def __init__(self, folder: Path, *, keep: int = 2) -> None:
        self._folder = folder
        self._keep = keep

    async def write(self, snapshot: Snapshot, learner: Learner) -> Path:
        """See Checkpoints. Removes the oldest checkpoints beyond ``keep``."""
        final = self._folder / checkpoint_name(snapshot.step)
        for torn in self._folder.glob(".step-*"):
            shutil.rmtree(torn, ignore_errors=True)
        if not (final / MARKER).exists():
            await self._make(final, snapshot, learner)
        for old in complete(self._folder)[: -self._keep]:
            _remove(old)
        return final

    async def _make(self, final: Path, snapshot: Snapshot, learner: Learner) -> None:
        aside = self._folder / f".{final.name}.writing"
        try:
            shutil.rmtree(final, ignore_errors=True)
            (aside / LEARNER).mkdir(parents=True)
            await learner.save(aside / LEARNER)
            _write_flushed(aside / CONTROL, serialization.encode(snapshot))
            _flush_folder(aside / LEARNER)
            _write_flushed(aside / MARKER, b"")
            _flush_folder(aside)
            aside.rename(final)
            _flush_folder(self._folder)
        except OSError as error:
            shutil.rmtree(aside, ignore_errors=True)
            raise CheckpointError(
                f"checkpoint {final} could not be written: {error}; earlier ones are intact"
            ) from error


def _remove(old: Path) -> None:
    """Remove a checkpoint in one step as far as readers can tell: one that was removed in part would look complete."""
    aside = old.with_name(f".{old.name}.removing")
    try:
        old.rename(aside)
    except OSError:
        return
    shutil.rmtree(aside, ignore_errors=True)


def complete(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    found = [(step, path) for path in folder.glob("*") if (step := step_of_checkpoint(path.name)) is not None]
    return [path for _, path in sorted(found) if (path / MARKER).exists()]


def latest(folder: Path) -> Path | None:
    """The newest complete checkpoint; None when there is none."""
    return next(reversed(complete(folder)), None)


def read(path: Path) -> Snapshot:
    """The control plane's half of a checkpoint. Raises CheckpointError when it cannot be read."""
    try:
        return serialization.decode((path / CONTROL).read_bytes(), Snapshot)
    except (OSError, msgspec.MsgspecError, ValueError, TypeError) as error:
        raise CheckpointError(f"checkpoint {path} cannot be read: {error}") from error


def _write_flushed(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _flush_folder(path: Path) -> None:
    """Flush a folder's files and its own entries to disk."""
    for entry in [*(p for p in path.iterdir() if p.is_file()), path]:
        handle = os.open(entry, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
