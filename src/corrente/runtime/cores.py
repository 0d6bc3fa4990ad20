"""The synchronous hearts of the workers, as a runtime sees them, and how they are built from a config.

A runtime decides where a core runs and how calls reach it; it knows no implementation. Cores are named by dotted path
("module:attribute") and imported where they run, so that neither the controller nor this package imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from corrente.config import Embedded, Lora, RunConfig, schema
from corrente.data.types import ApplyMode, Batch, Completion, Request, Scores, Tokens
from corrente.engine.base import EngineStats
from corrente.errors import ConfigError, GenerationError
from corrente.learner.base import Pulse, no_pulse
from corrente.models import devices
from corrente.sync.base import Update
from corrente.sync.layout import Layout

if TYPE_CHECKING:
    import torch


class EngineCore(Protocol):
    """One engine, driven step by step from one thread. See engine/embedded/core.py."""

    def layout(self) -> Layout: ...

    def attach_buffers(self, buffers: Sequence[torch.Tensor]) -> None: ...

    def apply(self, update: Update, mode: ApplyMode) -> None: ...

    def is_slot_free(self, slot: int) -> bool: ...

    def pause(self) -> None: ...

    def submit(self, request: Request) -> None: ...

    def abort(self, ids: Sequence[str]) -> None: ...

    def step(self) -> list[tuple[str, Completion | GenerationError]]: ...

    def partial_completions(self, ids: Sequence[str]) -> Mapping[str, Completion]: ...

    def score(self, tokens: Tokens, top: int = 0, *, temperature: float = 1.0) -> Scores: ...

    def stats(self) -> EngineStats: ...

    @property
    def device(self) -> str: ...

    @property
    def idle(self) -> bool: ...


class LearnerCore(Protocol):
    """One learner, called from one thread. See learner/core.py."""

    def step(self, batch: Batch, *, pulse: Pulse = no_pulse) -> dict[str, float]: ...

    def tensors(self) -> Mapping[str, torch.Tensor]: ...

    def save(self, path: Path) -> None: ...

    def load(self, path: Path) -> None: ...


def engine(config: RunConfig, index: int = 0) -> EngineCore:
    """The embedded engine a config asks for, without weights. ``index``: its turn among the GPUs; see devices.py."""
    from corrente.engine.embedded.core import EmbeddedCore

    section, model = config.engine, config.model
    if not isinstance(section, Embedded):
        raise ConfigError(f'engine.kind = "{schema.kind_of(section)}": no worker of corrente serves it')
    return EmbeddedCore(
        model=Path(model.path),
        dtype=model.dtype,
        device=devices.engine_device(model.device, index),
        max_sequences=section.max_sequences,
        max_context=section.max_context,
        path=section.path,
        keep_routing=model.keep_routing,
        trust_remote_code=model.trust_remote_code,
        adapters=config.adapters if isinstance(config.adapters, Lora) else None,
    )


def learner(config: RunConfig) -> LearnerCore:
    """The learner a config asks for, with the model's weights loaded."""
    from corrente.learner.core import TorchLearner

    return TorchLearner(config, device=devices.learner_device(config.model.device))
