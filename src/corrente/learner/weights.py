"""A model's weights alone, sent to engines as a learner would send them: an evaluation has this in a learner's place.

There is no optimizer, no gradient and nothing to save; it holds one copy of the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from torch import Tensor

from corrente import adapters
from corrente.adapters.base import Adapters
from corrente.common.imports import load_object
from corrente.config import RunConfig
from corrente.config.schema import kind_of
from corrente.data.types import Batch
from corrente.errors import PipelineError
from corrente.learner.base import Pulse, no_pulse
from corrente.learner.model import load_model

WHY = "an evaluation has weights, and no learner that could"


class WeightsCore:
    """Implements runtime.cores.LearnerCore as far as engines need it; the rest is refused. Raises ConfigError as the learner."""

    def __init__(self, config: RunConfig, *, device: str = "cpu") -> None:
        self._adapters: Adapters = load_object(adapters.KINDS[kind_of(config.adapters)])(
            config.adapters,
            source=Path(config.model.path),
            load=partial(load_model, device=device),
            seed=config.run.seed,
        )
        self._adapters.model.requires_grad_(False)

    def tensors(self) -> Mapping[str, Tensor]:
        """The tensors to ship to the engines, by name; see Adapters."""
        return self._adapters.tensors()

    def step(self, batch: Batch, *, pulse: Pulse = no_pulse) -> dict[str, float]:
        raise PipelineError(f"{WHY} take a step")

    def save(self, path: Path) -> None:
        raise PipelineError(f"{WHY} save to {path}")

    def load(self, path: Path) -> None:
        raise PipelineError(f"{WHY} load {path}")
