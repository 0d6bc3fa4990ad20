"""Everything in this process: the synchronous baseline, and where to set a breakpoint.

The engine's decode steps run as one task of the event loop, and give way to others after each; a training step or a publish
blocks the loop until it is done. So nothing overlaps, and a run is the same for the same seed.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel

from corrente.common.events import LogEvent, ignore_event
from corrente.common.imports import load_object
from corrente.common.spawn import Spawner
from corrente.config import Inline, RunConfig
from corrente.data.types import ApplyMode, Batch, Metrics, Scores, Tokens
from corrente.errors import raising_root_cause
from corrente.runtime import cores
from corrente.runtime.base import Workers
from corrente.runtime.placement import available_cpus
from corrente.runtime.teacher_worker import as_teacher, self_teacher, terms
from corrente.sync.base import Update
from corrente.sync.offers import Offer


class InlineLearner:
    """A learner called directly."""

    def __init__(self, core: cores.LearnerCore) -> None:
        self.core = core
        self._pieces = 0

    async def step(self, batch: Batch) -> Metrics:
        await anyio.lowlevel.checkpoint()
        return self.core.step(batch, pulse=self._pulse)

    async def save(self, path: Path) -> None:
        await anyio.lowlevel.checkpoint()
        self.core.save(path)

    async def load(self, path: Path) -> None:
        await anyio.lowlevel.checkpoint()
        self.core.load(path)

    def progress(self) -> int:
        return self._pieces

    def _pulse(self) -> None:
        self._pieces += 1


class InlineTeacher:
    """Implements SelfTeacher: a second engine of this process, called directly; it copies versions from the first's buffers."""

    def __init__(self, core: cores.EngineCore, receiver: Any, *, temperature: float) -> None:
        self._core, self._receiver, self._temperature = core, receiver, temperature
        core.attach_buffers(receiver.slots)

    async def score(self, tokens: Tokens, *, top: int = 0) -> Scores:
        await anyio.lowlevel.checkpoint()
        return self._core.score(tokens, top, temperature=self._temperature)

    async def reserve(self, slot: int) -> None:
        await anyio.lowlevel.checkpoint()

    async def receive(self, offer: Offer) -> None:
        await anyio.lowlevel.checkpoint()
        self._receiver.receive(offer)

    async def apply(self, update: Update, mode: ApplyMode) -> float:
        await anyio.lowlevel.checkpoint()
        began = time.perf_counter()
        self._core.apply(self._receiver.use(update), "swap")
        return time.perf_counter() - began

    def members(self) -> int:
        return 1


class InlineRuntime:
    """Implements Runtime. ``engine`` and ``learner`` are dotted paths of the functions that build the cores from a config;
    ``engine`` is a seam for tests. Nothing is started, so ``spawner`` and ``logs`` are not used."""

    def __init__(
        self,
        *,
        engine: str = "corrente.runtime.cores:engine",
        learner: str = "corrente.runtime.cores:learner",
        spawner: Spawner | None = None,
        logs: Path | None = None,
    ) -> None:
        self._engine, self._learner = engine, learner

    def open(self, config: RunConfig, *, log_event: LogEvent = ignore_event) -> AbstractAsyncContextManager[Workers]:
        """See Runtime. There is no other process to die; what the engine raises ends the run as it is."""
        return self._open(config, log_event)

    @asynccontextmanager
    async def _open(self, config: RunConfig, log_event: LogEvent) -> AsyncIterator[Workers]:
        import torch

        from corrente.engine.embedded.async_engine import EmbeddedEngine
        from corrente.sync.inproc import InprocSync
        from corrente.sync.lagged import LaggedSync
        from corrente.sync.weight_slots import allocate_slots

        before = torch.get_num_threads()
        asked = config.runtime.threads if isinstance(config.runtime, Inline) else 0
        torch.set_num_threads(asked or len(available_cpus()))
        try:
            core, learner = load_object(self._engine)(config), load_object(self._learner)(config)
            engine = EmbeddedEngine(core)
            buffers = allocate_slots(core.layout(), device=core.device)
            core.attach_buffers(buffers)
            sync = InprocSync(engine=engine, layout=core.layout(), buffers=buffers, tensors=learner.tensors)
            teacher = self._teacher(config, buffers)
            with raising_root_cause():
                async with anyio.create_task_group() as group:
                    group.start_soon(engine.run)
                    if teacher is not None:
                        sync = LaggedSync(sync, teacher, log_event=log_event, before_export=True)
                        group.start_soon(sync.run)
                    yield Workers(engine=engine, learner=InlineLearner(learner), sync=sync, teacher=teacher)
                    group.cancel_scope.cancel()
        finally:
            torch.set_num_threads(before)

    def _teacher(self, config: RunConfig, buffers: Any) -> InlineTeacher | None:
        from corrente.sync.lagged_receiver import LaggedReceiver

        if self_teacher(config) is None:
            return None
        core, (lag, temperature) = load_object(self._engine)(as_teacher(config)), terms(config)
        receiver = LaggedReceiver(core.layout(), lag=lag, shared=buffers, device=core.device)
        return InlineTeacher(core, receiver, temperature=temperature)
