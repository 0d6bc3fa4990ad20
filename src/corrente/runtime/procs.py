"""A controller in this process, the engine's replicas and the learner in workers beside it, weights in memory that they share.

    +------------+    socket pairs   +----------+
    | controller |-------------------| engine-0 |----+
    | (pipeline, |-------------------| engine-1 |----|   two weight buffers
    |  pool)     |--------+          +----------+    |   in anonymous memory
    +------------+        |          +----------+    |
                          +----------| learner  |----+
                                     +----------+

The controller computes nothing. A spawner starts the workers (common/spawn.py). On one host they are held together by descriptors
that were inherited: nothing has a name, so runs cannot collide and nothing is left behind, whoever is killed. Engines are started
through a launcher, one for each kind of them, and stand behind a pool, also when there is only one: it replaces those that die.
The learner's death ends the run.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import anyio
from anyio.abc import TaskGroup

from corrente.common.events import LogEvent, ignore_event
from corrente.common.imports import load_object
from corrente.common.local_spawner import local_unless
from corrente.common.spawn import LocalOnly, Spawner, Worker, WorkerRole
from corrente.config import Embedded, Procs, RunConfig
from corrente.engine import launcher
from corrente.engine.launcher import Launcher
from corrente.errors import ConfigError, raising_root_cause
from corrente.runtime import wire
from corrente.runtime.base import Workers
from corrente.runtime.embedded_launcher import EmbeddedLauncher, log_path, prepare_engine, ready_within
from corrente.runtime.handles import ProcEngine, ProcLearner
from corrente.runtime.join_server import JoinServer
from corrente.runtime.placement import Places, available_cpus, computing_place, places
from corrente.runtime.run_weights import RunWeights
from corrente.runtime.teacher_worker import self_teacher
from corrente.sync.kinds import transport_of

LEARNER_ROLE = "corrente.runtime.learner_worker:LearnerRole"
TEACHER_ROLE = "corrente.runtime.teacher_worker:TeacherRole"

PlaceWorkers = Callable[[Literal["shared", "pinned", "priority"], Sequence[int]], Places]


class ProcsRuntime:
    """Implements Runtime. ``spawner`` starts the workers; None: they are children of this process. ``logs``: a folder for their
    logs. ``learner``: dotted path of the function that builds the learner's core from a config.

    Seams for tests and benchmarks: ``engine``, the same for the engine's core; ``place`` turns a placement into places.
    """

    def __init__(
        self,
        *,
        engine: str = "corrente.runtime.cores:engine",
        learner: str = "corrente.runtime.cores:learner",
        spawner: Spawner | None = None,
        logs: Path | None = None,
        place: PlaceWorkers = places,
    ) -> None:
        self._engine, self._learner, self._logs, self._place = engine, learner, logs, place
        self._spawner = spawner

    def open(self, config: RunConfig, *, log_event: LogEvent = ignore_event) -> AbstractAsyncContextManager[Workers]:
        """See Runtime. A death is raised before all else; any other error, of the body or of starting, as it is."""
        return self._open(config, log_event)

    @asynccontextmanager
    async def _open(self, config: RunConfig, log_event: LogEvent) -> AsyncIterator[Workers]:
        with raising_root_cause():
            async with local_unless(self._spawner) as spawner, self._open_with(spawner, config, log_event) as workers:
                yield workers

    @asynccontextmanager
    async def _open_with(self, spawner: Spawner, config: RunConfig, log_event: LogEvent) -> AsyncIterator[Workers]:
        from corrente.sync.lagged import LaggedSync
        from corrente.sync.shared_memory import SharedMemory
        from corrente.sync.slot_sync import build

        section = config.runtime if isinstance(config.runtime, Procs) else Procs()
        where = self._place(section.placement, available_cpus())
        memory = SharedMemory() if transport_of(config.sync).shares_memory else None
        weights = RunWeights(memory)
        try:
            async with anyio.create_task_group() as group:
                pool = _pool(config, self._launcher(spawner, config, where, weights, log_event), log_event)
                learner, teacher = await self._start(_sharing(spawner, weights), config, where, pool, weights, group)
                sender = ProcLearner(learner)
                sync = build(config.sync, engine=pool, sender=sender)
                pool.catch_up_by(sync.catch_up)
                own = ProcEngine(teacher) if teacher is not None else None
                if own is not None:
                    sync = LaggedSync(sync, own, log_event=log_event)
                    group.start_soon(sync.run)
                if config.pool.join:
                    await group.start(self._join_server(config, weights, pool, log_event).run)
                yield Workers(engine=pool, learner=sender, sync=sync, teacher=own)
                group.cancel_scope.cancel()
        finally:
            weights.close()

    async def _start(
        self,
        spawner: Spawner,
        config: RunConfig,
        where: Places,
        pool: Any,
        weights: RunWeights,
        group: TaskGroup,
    ) -> tuple[Worker, Worker | None]:
        """Have all workers load at once, then give the learner the memory that the engines' layout needs."""
        workers: dict[str, Worker] = {}
        start_s = config.runtime.start_deadline_s if isinstance(config.runtime, Procs) else Procs().start_deadline_s
        place = computing_place(where.learner, os.environ)

        async def spawn(name: str, path: str) -> Worker:
            role, log = WorkerRole(name=name, path=path), log_path(self._logs, name)
            workers[name] = await spawner.spawn(role, place=place, log=log)
            group.start_soon(_watch, workers[name], config.limits.stop_s)
            return workers[name]

        async def load_learner() -> None:
            with ready_within(start_s, "the learner"):
                learner = await spawn("learner", LEARNER_ROLE)
                await learner.call(wire.Start(factory=self._learner, config=config), None)

        async def load_teacher() -> None:
            with ready_within(start_s, "the self-teacher"):
                teacher, index = await spawn("self-teacher", TEACHER_ROLE), config.pool.replicas
                await prepare_engine(teacher, self._engine, config, weights, fd=weights.fd, index=index)

        async with anyio.create_task_group() as loading:
            loading.start_soon(group.start, pool.run)
            loading.start_soon(load_learner)
            if self_teacher(config) is not None:
                loading.start_soon(load_teacher)
        assert weights.layout is not None
        learner = workers["learner"]
        await learner.call(wire.Attach(layout=weights.layout, fd=weights.fd, path=weights.path), None)
        return learner, workers.get("self-teacher")

    def _launcher(
        self, spawner: Spawner, config: RunConfig, where: Places, weights: RunWeights, log_event: LogEvent
    ) -> Launcher:
        if not isinstance(config.engine, Embedded):
            make = load_object(launcher.KINDS[type(config.engine)])
            return make(config, weights=weights, spawner=spawner, logs=self._logs, log_event=log_event)
        return EmbeddedLauncher(
            config,
            weights=weights,
            spawner=_sharing(spawner, weights),
            logs=self._logs,
            factory=self._engine,
            place=where.engine,
        )

    def _join_server(self, config: RunConfig, weights: RunWeights, pool: Any, log_event: LogEvent) -> JoinServer:
        folder = Path(config.run.dir) / config.run.name
        return JoinServer(folder, config, factory=self._engine, weights=weights, pool=pool, log_event=log_event)


def _sharing(spawner: Spawner, weights: RunWeights) -> Spawner:
    """A spawner whose workers inherit the descriptor of the shared memory, where there is one."""
    if weights.fd is None:
        return spawner
    if not isinstance(spawner, LocalOnly):
        raise ConfigError(
            'sync.kind = "shm": workers on other hosts share no memory; another kind brings weights to them'
        )
    return spawner.inheriting(weights.fd)


async def _watch(worker: Worker, stop_s: float) -> None:
    """Raise the death of a worker that the run cannot go on without; stop it when the run is over."""
    try:
        raise await worker.ended()
    finally:
        with anyio.CancelScope(shield=True):
            await worker.stop(stop_s)


def _pool(config: RunConfig, launcher: Launcher, log_event: LogEvent) -> Any:
    """The pool. Each replica has half of the time that a publish may take: one that is stuck does not use up the others'."""
    from corrente.engine.pool.pool import EnginePool

    return EnginePool(
        launcher,
        restarts=config.pool.restarts,
        rows=config.engine.max_sequences,
        slack=config.run.group_size,
        deadline_s=config.sync.deadline_s / 2,
        log_event=log_event,
    )
