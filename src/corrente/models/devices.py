"""Which device a worker's model is on: a GPU where torch finds one, and which of several.

    learner     the last GPU: weights, gradients and optimizer need the most room
    engine i    the others in turn; where there is one GPU all share it

GPUs are those that CUDA shows, in its order: CUDA_VISIBLE_DEVICES says which these are. Nothing is divided between models that
share one. torch is imported where the answer depends on it, so ask in the process that has it anyway.
"""

from __future__ import annotations

from typing import Literal

from corrente.errors import ConfigError

Device = Literal["auto", "cpu", "cuda"]


def learner(wanted: Device) -> str:
    """The learner's device for ``model.device``, as torch names it. ConfigError as ``require``."""
    count = _usable(wanted)
    return f"cuda:{count - 1}" if count else "cpu"


def engine(wanted: Device, index: int = 0) -> str:
    """The device of the engine that has turn ``index``. ConfigError as ``require``."""
    count = _usable(wanted)
    return f"cuda:{index % max(1, count - 1)}" if count else "cpu"


def require(asked: str, *, at_least: int = 1) -> None:
    """Raise ConfigError where there are fewer GPUs than ``asked``, a key and its value, needs."""
    count = _count()
    if count < at_least:
        needed = "a GPU" if at_least == 1 else f"{at_least} GPUs, one for each engine and one for the learner"
        found = "none" if not count else str(count)
        raise ConfigError(f"{asked} needs {needed}, and torch finds {found} on this machine")


def _usable(wanted: Device) -> int:
    """How many GPUs there are to choose from."""
    if wanted == "cpu":
        return 0
    if wanted == "cuda":
        require('model.device = "cuda"')
    return _count()


def _count() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0
