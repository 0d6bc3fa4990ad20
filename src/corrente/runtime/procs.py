"""A controller in this process, the engine's replicas and the learner in children of it, weights in memory the children share.

    +------------+    socket pairs   +----------+
    | controller |-------------------| engine-0 |----+
    | (pipeline, |-------------------| engine-1 |----|   two weight buffers
    |  pool)     |--------+          +----------+    |   in anonymous memory
    +------------+        |          +----------+    |
                          +----------| learner  |----+
                                     +----------+

The controller computes nothing. All that holds them together is descriptors that were inherited: nothing has a name, so runs
cannot collide and nothing is left behind, whoever is killed. Engines are started through a launcher, one for each kind of them,
and stand behind a pool, also when there is only one: it replaces those that die. The learner's death ends the run.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import anyio
from anyio.abc import TaskGroup

from corrente.common.imports import load_object
from corrente.config import Embedded, Procs, RunConfig, Vllm
from corrente.engine.launcher import Launcher, Tell, untold
from corrente.runtime import wire
from corrente.runtime.base import Workers
from corrente.runtime.child import Child
from corrente.runtime.failures import as_one
from corrente.runtime.handles import ProcEngine, ProcLearner
from corrente.runtime.join_server import JoinServer
from corrente.runtime.launching import EmbeddedLauncher, RunWeights, prepare, ready_within
from corrente.runtime.placement import Places, available_cpus, places
from corrente.runtime.teacher_worker import self_teacher
from corrente.sync.kinds import transport_of

Place = Callable[[Literal["shared", "pinned", "priority"], Sequence[int]], Places]

LAUNCHERS: Mapping[type, str] = {Vllm: "corrente.engine.vllm.launcher:VllmLauncher"}
"""By section of the config; the embedded engine's is at hand. Built as runtime.base.Launcher says."""


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

    def open(self, config: RunConfig, *, tell: Tell = untold) -> AbstractAsyncContextManager[Workers]:
        """See Runtime. A death is raised before all else; any other error, of the body or of starting, as it is."""
        return self._open(config, tell)

    @asynccontextmanager
    async def _open(self, config: RunConfig, tell: Tell) -> AsyncIterator[Workers]:
        section = config.runtime if isinstance(config.runtime, Procs) else Procs()
        where = self._place(section.placement, available_cpus())
        memory = (
            load_object("corrente.sync.shared_memory:SharedMemory")()
            if transport_of(config.sync).shares_memory
            else None
        )
        weights = RunWeights(memory)
        with as_one():
            try:
                async with anyio.create_task_group() as group:
                    learner = self._spawn_learner(where, weights)
                    group.start_soon(_to_its_end, learner, config.limits.stop_s)
                    pool = _pool(config, self._launcher(config, where, weights, tell), tell)
                    teacher = self._spawn_teacher(config, where, weights)
                    if teacher is not None:
                        group.start_soon(_to_its_end, teacher, config.limits.stop_s)
                    await self._start(config, learner, pool, teacher, weights, group)
                    sender = ProcLearner(learner)
                    sync = load_object("corrente.sync.slot_sync:build")(config.sync, engine=pool, sender=sender)
                    pool.catch_up_by(sync.catch_up)
                    own = ProcEngine(teacher) if teacher is not None else None
                    if own is not None:
                        sync = load_object("corrente.sync.lagged:LaggedSync")(sync, own, tell=tell)
                        group.start_soon(sync.run)
                    if config.pool.join:
                        await group.start(self._doorkeeper(config, weights, pool, tell).run)
                    yield Workers(engine=pool, learner=sender, sync=sync, teacher=own)
                    group.cancel_scope.cancel()
            finally:
                weights.close()

    def _spawn_learner(self, where: Places, weights: RunWeights) -> Child:
        return Child.spawn(
            "learner",
            role="corrente.runtime.learner_worker:LearnerRole",
            place=where.learner,
            inherit=() if weights.fd is None else (weights.fd,),
            log=self._logs / "learner.log" if self._logs is not None else None,
        )

    def _spawn_teacher(self, config: RunConfig, where: Places, weights: RunWeights) -> Child | None:
        if self_teacher(config) is None:
            return None
        return Child.spawn(
            "self-teacher",
            role="corrente.runtime.teacher_worker:TeacherRole",
            place=where.learner,
            inherit=() if weights.fd is None else (weights.fd,),
            log=self._logs / "self-teacher.log" if self._logs is not None else None,
        )

    def _launcher(self, config: RunConfig, where: Places, weights: RunWeights, tell: Tell) -> Launcher:
        if not isinstance(config.engine, Embedded):
            return load_object(LAUNCHERS[type(config.engine)])(config, weights=weights, logs=self._logs, tell=tell)
        return EmbeddedLauncher(config, weights=weights, logs=self._logs, factory=self._engine, place=where.engine)

    def _doorkeeper(self, config: RunConfig, weights: RunWeights, pool: Any, tell: Tell) -> JoinServer:
        folder = Path(config.run.dir) / config.run.name
        return JoinServer(folder, config, factory=self._engine, weights=weights, pool=pool, tell=tell)

    async def _load_learner(self, config: RunConfig, learner: Child) -> None:
        section = config.runtime if isinstance(config.runtime, Procs) else Procs()
        with ready_within(section.start_deadline_s, "the learner"):
            await learner.call(wire.Start(factory=self._learner, config=config), None)

    async def _load_teacher(self, config: RunConfig, teacher: Child, weights: RunWeights) -> None:
        section = config.runtime if isinstance(config.runtime, Procs) else Procs()
        with ready_within(section.start_deadline_s, "the self-teacher"):
            await prepare(teacher, self._engine, config, weights, fd=weights.fd, index=config.pool.replicas)

    async def _start(
        self,
        config: RunConfig,
        learner: Child,
        pool: Any,
        teacher: Child | None,
        weights: RunWeights,
        group: TaskGroup,
    ) -> None:
        """Have all of them load at once, then give the learner the memory that the engines' layout needs."""
        async with anyio.create_task_group() as loading:
            loading.start_soon(group.start, pool.run)
            loading.start_soon(self._load_learner, config, learner)
            if teacher is not None:
                loading.start_soon(self._load_teacher, config, teacher, weights)
        assert weights.layout is not None
        await learner.call(wire.Attach(layout=weights.layout, fd=weights.fd, path=weights.path), None)


async def _to_its_end(child: Child, stop_s: float) -> None:
    """Watch a worker; stop it when it is not needed any more."""
    try:
        await child.watch()
    finally:
        with anyio.CancelScope(shield=True):
            await child.stop(stop_s)


def _pool(config: RunConfig, launcher: Launcher, tell: Tell) -> Any:
    """Half of the time that a publish may take is each replica's: one that is stuck does not cost the others theirs."""
    return load_object("corrente.engine.pool.pool:EnginePool")(
        launcher,
        restarts=config.pool.restarts,
        rows=config.engine.max_sequences,
        slack=config.run.group_size,
        deadline_s=config.sync.deadline_s / 2,
        tell=tell,
    )
