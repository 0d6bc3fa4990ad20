"""corrente post-trains language models with reinforcement learning while generation never stops and training never waits.

from corrente import evaluate, load_config, train

result = train(load_config("examples/arithmetic.toml"))
print(result, evaluate(result.folder))
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from corrente.version import __version__

if TYPE_CHECKING:
    from corrente.config import RunConfig
    from corrente.config.load import load_config
    from corrente.entrypoints.evaluate import evaluate
    from corrente.entrypoints.inputs import RunInputs
    from corrente.entrypoints.train import train
    from corrente.trl import AsyncGRPOConfig, AsyncGRPOTrainer, GRPOConfig, GRPOTrainer

__all__ = [
    "AsyncGRPOConfig",
    "AsyncGRPOTrainer",
    "GRPOConfig",
    "GRPOTrainer",
    "RunConfig",
    "RunInputs",
    "__version__",
    "evaluate",
    "load_config",
    "train",
]

_MODULES = {
    "RunConfig": "corrente.config",
    "RunInputs": "corrente.entrypoints.inputs",
    "evaluate": "corrente.entrypoints.evaluate",
    "load_config": "corrente.config.load",
    "train": "corrente.entrypoints.train",
}


def __getattr__(name: str) -> Any:
    """Public names are imported when they are asked for, so that ``import corrente`` stays light."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_MODULES.get(name, "corrente.trl")), name)
