"""The synchronous hearts of the workers, as a runtime sees them, and how they are built from a config.

A runtime decides where a core runs and how calls reach it; it knows no implementation. Cores are named by dotted path
("module:attribute") and imported where they run, so that neither the controller nor this package imports torch.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from corrente.config import RunConfig
from corrente.engine.base import ApplyMode, EngineStats
from corrente.errors import ConfigError, GenerationError
from corrente.sync.base import Update
from corrente.sync.layout import Layout
from corrente.types import Batch, Completion, Floats, Request, Tokens

if TYPE_CHECKING:
    import torch


class EngineCore(Protocol):
    """One engine, driven step by step from one thread. See engine/embedded/core.py."""

    def layout(self) -> Layout: ...

    def attach(self, buffers: Sequence[torch.Tensor]) -> None: ...

    def apply(self, update: Update, mode: ApplyMode) -> None: ...

    def submit(self, request: Request) -> None: ...

    def abort(self, ids: Sequence[str]) -> None: ...

    def step(self) -> list[tuple[str, Completion | GenerationError]]: ...

    def score(self, tokens: Tokens) -> Floats: ...

    def stats(self) -> EngineStats: ...

    @property
    def idle(self) -> bool: ...


class LearnerCore(Protocol):
    """One learner, called from one thread. See learner/core.py."""

    def step(self, batch: Batch) -> dict[str, float]: ...

    def tensors(self) -> Mapping[str, torch.Tensor]: ...

    def save(self, path: Path) -> None: ...

    def load(self, path: Path) -> None: ...


def load(path: str) -> Any:
    """The object a dotted path "module:attribute" names; ConfigError when there is none."""
    module, _, attribute = path.partition(":")
    found = getattr(importlib.import_module(module), attribute, None)
    if found is None:
        raise ConfigError(f"{path!r} names nothing: module {module} has no {attribute!r}")
    return found


def engine(config: RunConfig) -> EngineCore:
    """The embedded engine a config asks for, without weights."""
    section, model = config.engine, config.model
    return load("corrente.engine.embedded.core:EngineCore")(
        model=Path(model.path),
        dtype=model.dtype,
        max_sequences=section.max_sequences,
        max_context=section.max_context,
        path=section.path,
    )


def learner(config: RunConfig) -> LearnerCore:
    """The learner a config asks for, with the model's weights loaded."""
    return load("corrente.learner.core:LearnerCore")(config)


def attach(fd: int, layout: Layout) -> tuple[torch.Tensor, ...]:
    """The two shared weight buffers behind an inherited descriptor, as uint8 tensors (layout.nbytes,). None for an engine
    without weights."""
    if not layout.slabs:
        return ()
    import torch

    first, second = load("corrente.sync.memory:map_slots")(fd, layout.nbytes)
    return torch.frombuffer(first, dtype=torch.uint8), torch.frombuffer(second, dtype=torch.uint8)
