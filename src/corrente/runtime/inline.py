"""Everything in this process: the synchronous baseline, and where to set a breakpoint.

The engine's decode steps run as one task of the event loop, and give way to others after each; a training step or a publish
blocks the loop until it is done. So nothing overlaps, and a run is the same for the same seed.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import anyio
import anyio.lowlevel

from corrente.config import Inline, RunConfig
from corrente.runtime import cores
from corrente.runtime.base import Workers
from corrente.runtime.failures import as_one
from corrente.runtime.placement import available_cpus
from corrente.types import Batch, Metrics


class InlineLearner:
    """A learner called directly."""

    def __init__(self, core: cores.LearnerCore) -> None:
        self._core = core

    async def step(self, batch: Batch) -> Metrics:
        await anyio.lowlevel.checkpoint()
        return self._core.step(batch)

    async def save(self, path: Path) -> None:
        await anyio.lowlevel.checkpoint()
        self._core.save(path)

    async def load(self, path: Path) -> None:
        await anyio.lowlevel.checkpoint()
        self._core.load(path)


class InlineRuntime:
    """``engine`` and ``learner`` build the cores from a config."""

    def __init__(
        self,
        *,
        engine: Callable[[RunConfig], cores.EngineCore] = cores.engine,
        learner: Callable[[RunConfig], cores.LearnerCore] = cores.learner,
    ) -> None:
        self._engine, self._learner = engine, learner

    def open(self, config: RunConfig) -> AbstractAsyncContextManager[Workers]:
        """See Runtime. There is no other process to die; what the engine raises ends the run as it is."""
        return self._open(config)

    @asynccontextmanager
    async def _open(self, config: RunConfig) -> AsyncIterator[Workers]:
        import torch

        before = torch.get_num_threads()
        asked = config.runtime.threads if isinstance(config.runtime, Inline) else 0
        torch.set_num_threads(asked or len(available_cpus()))
        try:
            core, learner = self._engine(config), self._learner(config)
            engine = cores.load("corrente.engine.embedded.driver:EmbeddedEngine")(core)
            buffers = cores.load("corrente.sync.inproc:allocate")(core.layout())
            core.attach(buffers)
            sync = cores.load("corrente.sync.inproc:InprocSync")(
                engine=engine, layout=core.layout(), buffers=buffers, tensors=learner.tensors
            )
            with as_one():
                async with anyio.create_task_group() as group:
                    group.start_soon(engine.run)
                    yield Workers(engine=engine, learner=InlineLearner(learner), sync=sync)
                    group.cancel_scope.cancel()
        finally:
            torch.set_num_threads(before)
