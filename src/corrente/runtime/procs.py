"""A controller in this process, engine and learner in children of it, weights in memory the children share.

    +------------+    socket pair    +---------+
    | controller |-------------------| engine  |----+
    | (pipeline) |--------+          +---------+    |   two weight buffers
    +------------+        |          +---------+    |   in anonymous memory
                          +----------| learner |----+
                                     +---------+

The controller computes nothing. All that holds the three together is descriptors that were inherited: nothing has a name, so
runs cannot collide and nothing is left behind, whoever is killed.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Literal

import anyio

from corrente.config import Procs, RunConfig
from corrente.errors import PipelineError
from corrente.runtime import wire
from corrente.runtime.base import Workers
from corrente.runtime.child import Child
from corrente.runtime.cores import load
from corrente.runtime.failures import as_one
from corrente.runtime.handles import ProcEngine, ProcLearner
from corrente.runtime.placement import Places, available_cpus, places
from corrente.sync.layout import Layout

Place = Callable[[Literal["shared", "pinned", "priority"], Sequence[int]], Places]


class ProcsRuntime:
    """``engine`` and ``learner`` are dotted paths of what builds the cores from a config; ``logs`` is a folder for what the
    workers write to their standard output and error; ``place`` decides what a placement means (see placement.places)."""

    def __init__(
        self,
        *,
        engine: str = "corrente.runtime.cores:engine",
        learner: str = "corrente.runtime.cores:learner",
        logs: Path | None = None,
        place: Place = places,
    ) -> None:
        self._engine, self._learner, self._logs, self._place = engine, learner, logs, place

    def open(self, config: RunConfig) -> AbstractAsyncContextManager[Workers]:
        """See Runtime. A death is raised before all else; any other error, of the body or of starting, as it is."""
        return self._open(config)

    @asynccontextmanager
    async def _open(self, config: RunConfig) -> AsyncIterator[Workers]:
        section = config.runtime if isinstance(config.runtime, Procs) else Procs()
        memory = load("corrente.sync.memory:SharedMemory")()
        children: list[Child] = []
        with as_one():
            try:
                async with anyio.create_task_group() as group:
                    engine, learner = self._spawn(section, memory.fd, children)
                    group.start_soon(engine.watch)
                    group.start_soon(learner.watch)
                    with _deadline(section.start_deadline_s):
                        layout = await self._start(config, engine, learner, memory)
                    handles = ProcEngine(engine), ProcLearner(learner)
                    sync = load("corrente.sync.shm:ShmSync")(
                        engine=handles[0], export=handles[1].export, nbytes=layout.nbytes
                    )
                    yield Workers(engine=handles[0], learner=handles[1], sync=sync)
                    group.cancel_scope.cancel()
            finally:
                memory.close()
                with anyio.CancelScope(shield=True):
                    await _stop(children, config.limits.stop_s)

    def _spawn(self, section: Procs, memory_fd: int, children: list[Child]) -> tuple[Child, Child]:
        """Start both processes; each is in ``children`` as soon as it exists."""
        where = self._place(section.placement, available_cpus())
        for name, place in (("engine", where.engine), ("learner", where.learner)):
            log = self._logs / f"{name}.log" if self._logs is not None else None
            role = f"corrente.runtime.{name}_worker:{name.capitalize()}Role"
            children.append(Child.spawn(name, role=role, place=place, inherit=(memory_fd,), log=log))
        return children[0], children[1]

    async def _start(self, config: RunConfig, engine: Child, learner: Child, memory: Any) -> Layout:
        """Have both build their cores at once, then give them the memory that the engine's layout needs."""
        layouts: list[Layout] = []

        async def build_engine() -> None:
            layouts.append(await engine.call(wire.Start(factory=self._engine, config=config), Layout))

        async with anyio.create_task_group() as group:
            group.start_soon(build_engine)
            group.start_soon(learner.call, wire.Start(factory=self._learner, config=config), None)
        memory.reserve(layouts[0].nbytes)
        async with anyio.create_task_group() as group:
            for child in (engine, learner):
                group.start_soon(child.call, wire.Attach(fd=memory.fd, layout=layouts[0]), None)
        memory.close()
        return layouts[0]


@contextmanager
def _deadline(seconds: float) -> Iterator[None]:
    with anyio.move_on_after(seconds) as scope:
        yield
    if scope.cancelled_caught:
        raise PipelineError(f"the workers were not ready after {seconds:g} s; runtime.start_deadline_s allows more")


async def _stop(children: list[Child], within_s: float) -> None:
    async with anyio.create_task_group() as group:
        for child in children:
            group.start_soon(child.stop, within_s)
