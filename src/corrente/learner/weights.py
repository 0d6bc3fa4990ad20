"""A model's weights, to be sent to engines as the learner would send them: what an evaluation has in a learner's place.

There is no optimizer, no gradient and nothing to save; it holds one copy of the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from torch import Tensor

from corrente.adapters.base import Adapters
from corrente.common.imports import load_object
from corrente.config import RunConfig
from corrente.data.types import Batch
from corrente.errors import PipelineError
from corrente.learner.base import Pulse, unheard
from corrente.learner.core import ADAPTERS
from corrente.learner.model import load_model

WHY = "an evaluation has weights, and no learner that could"


class WeightsCore:
    """Implements runtime.cores.LearnerCore as far as engines need it; the rest is refused. Raises ConfigError as the learner."""

    def __init__(self, config: RunConfig, *, device: str = "cpu") -> None:
        kind = str(config.adapters.__struct_config__.tag)
        self._adapters: Adapters = load_object(ADAPTERS[kind])(
            config.adapters,
            source=Path(config.model.path),
            load=partial(load_model, device=device),
            seed=config.run.seed,
        )
        self._adapters.model.requires_grad_(False)

    def tensors(self) -> Mapping[str, Tensor]:
        """What is shipped to the engines, by name; see Adapters."""
        return self._adapters.tensors()

    def step(self, batch: Batch, *, pulse: Pulse = unheard) -> dict[str, float]:
        raise PipelineError(f"{WHY} take a step")

    def save(self, path: Path) -> None:
        raise PipelineError(f"{WHY} save to {path}")

    def load(self, path: Path) -> None:
        raise PipelineError(f"{WHY} load {path}")
