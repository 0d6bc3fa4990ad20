"""The best of a run's checkpoints, by the metric that was followed: its weights, and the removal of the others."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

from corrente.controller import checkpoint_folder
from corrente.data.checkpoint_names import step_of_checkpoint
from corrente.trl.checkpoint_links import linked_checkpoint


def choose_best(trainer: Any, last: Path) -> Path:
    """The checkpoint of the best evaluation of the run whose newest is ``last``; with a warning ``last`` where there is none.

    Writes it into the trainer's state. With save_total_limit the others are removed but for the newest.
    """
    state, limit = trainer.state, trainer.args.save_total_limit
    found = checkpoint_folder.complete(last.parent)
    updates = max(1, trainer.args.num_iterations)
    wanted = None if state.best_global_step is None else state.best_global_step // updates
    best = next((path for path in found if step_of_checkpoint(path.name) == wanted), None)
    if best is None:
        warnings.warn("load_best_model_at_end: no evaluation has a checkpoint; the last weights are kept", stacklevel=5)
        return last
    output = last.parents[3]
    state.best_model_checkpoint = str(output / f"checkpoint-{state.best_global_step}")
    if limit:
        _remove_others(found, output, best=best, newest=limit)
    return best


def _remove_others(found: list[Path], output: Path, *, best: Path, newest: int) -> None:
    """Remove all checkpoints but the best, the last, and as many of the newest as make up ``newest``, and the links to them."""
    others = [path for path in found if path != best]
    kept = {best, found[-1], *others[len(others) - (newest - 1) :]}
    for old in found:
        if old not in kept:
            shutil.rmtree(old, ignore_errors=True)
    for link in output.glob("checkpoint-*"):
        source = linked_checkpoint(link)
        if source is not None and not source.exists():
            link.unlink() if link.is_symlink() else shutil.rmtree(link)
