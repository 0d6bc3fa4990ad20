"""Embedded engines as replicas: a worker process for each, all of which map the same two weight buffers.

The learner writes a version once, wherever it goes: in shared memory one export serves all replicas. With another transport each
worker has buffers of its own.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from pathlib import Path

import anyio

from corrente.common.spawn import RpcCaller, Spawner, Worker, WorkerPlace, WorkerRole
from corrente.config import Procs, RunConfig
from corrente.engine.launcher import Replica, SharedWeights
from corrente.errors import PipelineError
from corrente.runtime import wire
from corrente.runtime.handles import ProcEngine
from corrente.runtime.placement import available_cpus, computing_place, places, share
from corrente.sync.layout import Layout

ENGINE_ROLE = "corrente.runtime.engine_worker:EngineRole"


class EmbeddedLauncher:
    """Implements Launcher. ``spawner`` starts workers, which inherit the descriptor of ``weights`` if there is one. ``factory``:
    dotted path of the function that builds the core from a config."""

    def __init__(
        self,
        config: RunConfig,
        *,
        weights: SharedWeights,
        spawner: Spawner,
        logs: Path | None = None,
        factory: str = "corrente.runtime.cores:engine",
        place: WorkerPlace | None = None,
    ) -> None:
        section = config.runtime if isinstance(config.runtime, Procs) else Procs()
        self._config, self._weights, self._spawner, self._factory = config, weights, spawner, factory
        self._logs = logs
        self._place = place or places(section.placement, available_cpus()).engine
        self._deadline_s = section.start_deadline_s
        self.replicas = config.pool.replicas

    def launch(self, index: int) -> AbstractAsyncContextManager[Replica]:
        """See Launcher."""
        return self._launch(index)

    @asynccontextmanager
    async def _launch(self, index: int) -> AsyncIterator[Replica]:
        name = "engine" if self.replicas == 1 else f"engine-{index}"
        place = computing_place(share(self._place, among=self.replicas, index=index), os.environ)
        worker: Worker | None = None
        try:
            with ready_within(self._deadline_s, name):
                worker = await self._spawner.spawn(
                    WorkerRole(name=name, path=ENGINE_ROLE), place=place, log=log_path(self._logs, name)
                )
                layout = await prepare_engine(
                    worker, self._factory, self._config, self._weights, fd=self._weights.fd, index=index
                )
            yield Replica(name=name, engine=ProcEngine(worker), layout=layout, ended=worker.ended)
        finally:
            if worker is not None:
                with anyio.CancelScope(shield=True):
                    await worker.stop(self._config.limits.stop_s)


async def prepare_engine(
    worker: RpcCaller, factory: str, config: RunConfig, weights: SharedWeights, *, fd: int | None, index: int
) -> Layout:
    """Have a worker build its engine and prepare its weight buffers: those behind ``fd``, else where ``weights`` says.
    ``index``: its turn among the GPUs."""
    layout: Layout = await worker.call(wire.Start(factory=factory, config=config, index=index), Layout)
    weights.fit(layout)
    await worker.call(wire.Attach(layout=layout, fd=fd, path=weights.path), None)
    return layout


@contextmanager
def ready_within(seconds: float, who: str) -> Iterator[None]:
    """Bound a start. PipelineError past it."""
    with anyio.move_on_after(seconds) as scope:
        yield
    if scope.cancelled_caught:
        raise PipelineError(f"{who} was not ready after {seconds:g} s; runtime.start_deadline_s allows more")


def log_path(logs: Path | None, name: str) -> Path | None:
    """The log file of the worker ``name``; None where there is no folder for logs."""
    return None if logs is None else logs / f"{name}.log"
