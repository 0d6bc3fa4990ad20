"""Embedded engines as replicas: a child process for each, all of which map the same two weight buffers.

The learner writes a version once, wherever it goes: in shared memory one export serves all replicas. With another transport each
child has buffers of its own.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import anyio

from corrente.config import Procs, RunConfig
from corrente.engine.launcher import Replica, SharedWeights
from corrente.errors import ConfigError, PipelineError, WorkerDied
from corrente.runtime import wire
from corrente.runtime.child import Child
from corrente.runtime.failures import as_one
from corrente.runtime.handles import ProcEngine
from corrente.runtime.line import Caller
from corrente.runtime.placement import WorkerPlace, available_cpus, places, share
from corrente.sync.layout import Layout

ROLE = "corrente.runtime.engine_worker:EngineRole"


class RunWeights:
    """Implements SharedWeights over ``memory`` (sync/shared_memory.py), or over none where engines have slots of their own."""

    def __init__(self, memory: Any = None) -> None:
        self._memory = memory
        self.layout: Layout | None = None
        """What every engine of the run wants; None until the first has said so."""

    @property
    def fd(self) -> int | None:
        return None if self._memory is None else self._memory.fd

    @property
    def path(self) -> str:
        return "" if self._memory is None else self._memory.path

    def fit(self, layout: Layout) -> None:
        """See Weights."""
        if self.layout is None:
            if self._memory is not None:
                self._memory.reserve(layout.nbytes)
            self.layout = layout
        elif layout != self.layout:
            raise ConfigError(f"an engine with another model: {difference(layout, self.layout)}")

    def close(self) -> None:
        """Let go of the memory; who mapped it keeps it."""
        if self._memory is not None:
            self._memory.close()


class ExitWatcher:
    """Waits for the end of a worker, and remembers how it was."""

    def __init__(self) -> None:
        self._over = anyio.Event()
        self._death = WorkerDied("")

    async def watch(self, life: Callable[[], Any]) -> None:
        """Run ``life``, which raises WorkerDied at its end."""
        try:
            await life()
        except WorkerDied as death:
            self._death = death
            self._over.set()

    async def ended(self) -> WorkerDied:
        """See Replica.ended."""
        await self._over.wait()
        return self._death


class EmbeddedLauncher:
    """Implements Launcher. ``factory`` is the dotted path of what builds the core from a config."""

    def __init__(
        self,
        config: RunConfig,
        *,
        weights: SharedWeights,
        logs: Path | None = None,
        factory: str = "corrente.runtime.cores:engine",
        place: WorkerPlace | None = None,
    ) -> None:
        section = config.runtime if isinstance(config.runtime, Procs) else Procs()
        self._config, self._weights, self._logs, self._factory = config, weights, logs, factory
        self._place = place or places(section.placement, available_cpus()).engine
        self._deadline_s = section.start_deadline_s
        self.replicas = config.pool.replicas

    def launch(self, index: int) -> AbstractAsyncContextManager[Replica]:
        """See Launcher."""
        return self._launch(index)

    @asynccontextmanager
    async def _launch(self, index: int) -> AsyncIterator[Replica]:
        name = "engine" if self.replicas == 1 else f"engine-{index}"
        child = Child.spawn(
            name,
            role=ROLE,
            place=share(self._place, among=self.replicas, index=index),
            inherit=() if self._weights.fd is None else (self._weights.fd,),
            log=self._logs / f"{name}.log" if self._logs is not None else None,
        )
        deathbed = ExitWatcher()
        try:
            with as_one():
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(deathbed.watch, child.watch)
                    with ready_within(self._deadline_s, name):
                        layout = await prepare(
                            child, self._factory, self._config, self._weights, fd=self._weights.fd, index=index
                        )
                    yield Replica(name=name, engine=ProcEngine(child), layout=layout, ended=deathbed.ended)
                    tasks.cancel_scope.cancel()
        finally:
            with anyio.CancelScope(shield=True):
                await child.stop(self._config.limits.stop_s)


async def prepare(
    child: Caller, factory: str, config: RunConfig, weights: SharedWeights, *, fd: int | None, index: int
) -> Layout:
    """Have a worker build its engine and make ready its weight buffers: those behind ``fd``, else where ``weights`` says.
    ``index``: its turn among the GPUs."""
    layout: Layout = await child.call(wire.Start(factory=factory, config=config, index=index), Layout)
    weights.fit(layout)
    await child.call(wire.Attach(layout=layout, fd=fd, path=weights.path), None)
    return layout


@contextmanager
def ready_within(seconds: float, who: str) -> Iterator[None]:
    """Bound a start. PipelineError past it."""
    with anyio.move_on_after(seconds) as scope:
        yield
    if scope.cancelled_caught:
        raise PipelineError(f"{who} was not ready after {seconds:g} s; runtime.start_deadline_s allows more")


def difference(given: Layout, wanted: Layout) -> str:
    """The first thing in which a layout differs from what the run has, in words."""
    for mine, theirs in zip(given.slabs, wanted.slabs, strict=False):
        if mine != theirs:
            shape = f"{mine.name} is {mine.dtype} {tuple(mine.shape)}"
            return f"{shape}, where the run has {theirs.name} as {theirs.dtype} {tuple(theirs.shape)}"
    return f"it has {len(given.slabs)} tensors, the run {len(wanted.slabs)}"
