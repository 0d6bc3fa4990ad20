"""The door for TRL users: its trainers and configs over the pipeline of corrente. TRL itself is not needed.

    from corrente import AsyncGRPOConfig, AsyncGRPOTrainer        what TRL calls trl.experimental.async_grpo
    from corrente import GRPOConfig, GRPOTrainer                  the synchronous baseline of the same pipeline

training.py, methods.py    every argument of TRL's configs and where it stands: data
config.py                  the configs, made from it
translate.py, objective.py, optimizer.py, model_arguments.py, engines.py      arguments to a RunConfig
trainer_inputs.py, weights.py, best_checkpoint.py, checkpoint_links.py    models, tokenizers, rewards, adapters, checkpoints
trainer.py, constructor.py, callbacks.py, run_watcher.py, logs.py, publish.py     the trainers, and what callbacks see of a run

docs/how-to/from-trl.md lists every argument.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from corrente.trl.config import AsyncGRPOConfig, GRPOConfig
    from corrente.trl.trainer import AsyncGRPOTrainer, GRPOTrainer

__all__ = ["AsyncGRPOConfig", "AsyncGRPOTrainer", "GRPOConfig", "GRPOTrainer"]

_HOMES = {
    "AsyncGRPOConfig": "corrente.trl.config",
    "GRPOConfig": "corrente.trl.config",
    "AsyncGRPOTrainer": "corrente.trl.trainer",
    "GRPOTrainer": "corrente.trl.trainer",
}


def __getattr__(name: str) -> Any:
    """Import what is asked for, and no more."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
