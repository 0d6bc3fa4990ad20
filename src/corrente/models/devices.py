"""Choose the device of a worker's model: a GPU where torch finds one, and which of several.

    learner     the last GPU: weights, gradients and optimizer need the most room
    engine i    the others in turn; where there is one GPU all share it

GPUs are those that CUDA shows, in its order (CUDA_VISIBLE_DEVICES). Models that share a GPU are not given shares of it. torch is
imported only where the answer depends on it, so call these functions in a process that imports torch anyway.
"""

from __future__ import annotations

from typing import Literal

from corrente.errors import ConfigError

Device = Literal["auto", "cpu", "cuda"]


def learner_device(wanted: Device) -> str:
    """The learner's device for ``model.device``, as torch names it. Raises like ``require_gpus``."""
    count = _usable_gpus(wanted)
    return f"cuda:{count - 1}" if count else "cpu"


def engine_device(wanted: Device, index: int = 0) -> str:
    """The device of the engine with number ``index``, as torch names it. Raises like ``require_gpus``."""
    count = _usable_gpus(wanted)
    return f"cuda:{index % max(1, count - 1)}" if count else "cpu"


def require_gpus(asked: str, *, at_least: int = 1) -> None:
    """Raise ConfigError where there are fewer than ``at_least`` GPUs; ``asked`` is the key and value that needs them."""
    count = _count_gpus()
    if count < at_least:
        needed = "a GPU" if at_least == 1 else f"{at_least} GPUs, one for each engine and one for the learner"
        found = "none" if not count else str(count)
        raise ConfigError(f"{asked} needs {needed}, and torch finds {found} on this machine")


def _usable_gpus(wanted: Device) -> int:
    """The number of GPUs to choose from."""
    if wanted == "cpu":
        return 0
    if wanted == "cuda":
        require_gpus('model.device = "cuda"')
    return _count_gpus()


def _count_gpus() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0
