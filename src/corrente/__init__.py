"""corrente post-trains language models with reinforcement learning while generation never stops and training never waits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from corrente.version import __version__

if TYPE_CHECKING:
    from corrente.trl import AsyncGRPOConfig, AsyncGRPOTrainer, GRPOConfig, GRPOTrainer

__all__ = ["AsyncGRPOConfig", "AsyncGRPOTrainer", "GRPOConfig", "GRPOTrainer", "__version__"]


def __getattr__(name: str) -> Any:
    """The trainers are imported when they are asked for, so that ``import corrente`` stays light."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module("corrente.trl"), name)
