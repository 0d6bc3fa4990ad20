"""The contract of every Spawner and of its workers (common/spawn.py), held with real processes."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Literal

import anyio
import msgspec

from corrente.common import rpc
from corrente.common.rpc_server import Send
from corrente.common.spawn import Spawner, Worker, WorkerPlace, WorkerRole
from corrente.errors import ConfigError, PipelineError, WorkerDied
from corrente.testing.expect import expect, expect_raises

PROBE_ROLE = "corrente.testing.spawners:ProbeRole"
NOTICED_S = 1.0
STOPPED_S = 20.0
"""Bound on what has no bound of its own, on a busy machine."""


class SpawnerCase(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A spawner to check. ``exists`` says of the pid of a worker's process whether it still runs. ``abandon`` has another caller
    start a worker for a role, ends that caller by SIGKILL, and returns the worker's pid; None where that cannot be arranged."""

    spawner: Spawner
    exists: Callable[[int], bool]
    abandon: Callable[[WorkerRole], Awaitable[int]] | None = None


# fmt: off
ProbeAction = Literal[
    "echo", "pid", "hold", "release", "cancelled", "progress", "refuse", "raise", "variable",
    "write", "exit", "kill", "spin", "freeze", "fork",
]
# fmt: on


class ProbeCall(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Have the probe do something; ``text`` and ``number`` are what it does it with."""

    action: ProbeAction
    text: str = ""
    number: int = 0


class ProbeRole:
    """A role that behaves as it is told. ``refuse``, ``leave``: what it does instead of being built."""

    requests: Any = ProbeCall | rpc.CancelCall
    busy = False

    def __init__(self, send: Send, *, echo: Any = None, refuse: str = "", leave: int = 0) -> None:
        if refuse:
            raise ConfigError(refuse)
        if leave:
            sys.stderr.write("leaving\n")
            os._exit(leave)
        self._send, self._echo = send, echo
        self._held: list[int] = []
        self._cancelled = 0

    def handle(self, call: rpc.RpcCall[ProbeCall | rpc.CancelCall]) -> rpc.RpcAnswer | None:
        body = call.body
        if isinstance(body, rpc.CancelCall):
            self._held = [held for held in self._held if held != body.call]
            self._cancelled += 1
            return None
        if body.action == "hold":
            self._held.append(call.id)
            return None
        if body.action == "progress":
            for _ in range(body.number):
                self._send(rpc.RpcProgress(id=call.id))
        return rpc.reply(call.id, self._do(body))

    def work(self) -> list[rpc.RpcAnswer]:
        return []

    def close(self) -> None:
        """See Role."""

    def _do(self, body: ProbeCall) -> Any:
        match body.action:
            case "echo":
                return [self._echo, body.text]
            case "cancelled":
                return self._cancelled
            case "release":
                for held in self._held:
                    self._send(rpc.reply(held, "released"))
                self._held = []
            case "refuse":
                raise ConfigError(body.text)
            case "raise":
                raise ZeroDivisionError(body.text)
            case "variable":
                return os.environ.get(body.text, "")
            case _:
                return _to_the_process(body)
        return None


def _to_the_process(body: ProbeCall) -> Any:
    """Do to this process what ``body`` asks for."""
    match body.action:
        case "write":
            sys.stderr.write(f"{body.text}\n" * body.number)
        case "exit":
            sys.stderr.write(f"{body.text}\n")
            os._exit(body.number)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "freeze":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "spin":
            while True:
                pass
        case "fork":
            if child := os.fork():
                return child
            signal.pause()
        case _:
            pass
    return os.getpid()


async def check_spawner(make: Callable[[], AbstractAsyncContextManager[SpawnerCase]], folder: Path) -> None:
    """Hold the spawner that entering ``make()`` gives to the contract of common/spawn.py. ``folder``: empty, for logs.

    Takes seconds: workers are real processes, and some of them have to be killed.
    """
    for number, clause in enumerate(
        (
            _calls_are_answered,
            _errors_come_back,
            _cancelling_tells_the_role,
            _roles_are_built_or_refused,
            _places_are_kept,
            _an_exit_is_named,
            _a_kill_is_noticed,
            _output_is_logged,
            _stop_ends_idle_and_busy,
            _stop_kills_what_does_not_hear,
            _isolated_workers_end_with_their_forks,
            _no_worker_outlives_its_caller,
        )
    ):
        async with make() as case:
            await clause(case, folder / f"{number}.log")


def probe(**changes: Any) -> WorkerRole:
    """The role that the suite tells what to do."""
    return msgspec.structs.replace(WorkerRole(name="probe", path=PROBE_ROLE), **changes)


async def _ask(
    worker: Worker, action: ProbeAction, kind: Any = None, *, text: str = "", number: int = 0, **more: Any
) -> Any:
    return await worker.call(ProbeCall(action=action, text=text, number=number), kind, **more)


async def _calls_are_answered(case: SpawnerCase, log: Path) -> None:
    plain = {"a": [1, 2.5, None], "b": "text"}
    worker = await case.spawner.spawn(probe(arguments={"echo": plain}))
    answer = await _ask(worker, "echo", list[Any], text="x")
    expect(answer == [plain, "x"], "a role is built from plain data, and answers what is asked", answer)
    held: list[str] = []

    async def hold() -> None:
        held.append(await _ask(worker, "hold", str))

    async with anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(hold)
        await anyio.wait_all_tasks_blocked()
        await _ask(worker, "echo", list[Any])
        expect(not held, "many calls may be open at once, and be overtaken", held)
        await _ask(worker, "release")
    expect(held == ["released"] * 3, "and each gets its answer", held)
    pieces: list[None] = []
    await _ask(worker, "progress", int, number=3, on_progress=lambda: pieces.append(None))
    expect(len(pieces) == 3, "progress of a call reaches its caller before the answer", len(pieces))
    await worker.stop(STOPPED_S)


async def _errors_come_back(case: SpawnerCase, log: Path) -> None:
    worker = await case.spawner.spawn(probe())
    expected: dict[ProbeAction, tuple[type[Exception], str]] = {
        "refuse": (ConfigError, "so it is"),
        "raise": (PipelineError, "probe failed: ZeroDivisionError"),
    }
    for action, (kind, words) in expected.items():
        try:
            await _ask(worker, action, text="so it is")
        except kind as error:
            expect(words in str(error), "an error says what the role said, or who raised what", error)
        else:
            expect(False, "what a role raises is raised by the call", action)
    clause = "an answer of another type is a PipelineError"
    await expect_raises(PipelineError, clause, lambda: _ask(worker, "echo", int))
    await _ask(worker, "echo", list[Any])
    await worker.stop(STOPPED_S)


async def _cancelling_tells_the_role(case: SpawnerCase, log: Path) -> None:
    worker = await case.spawner.spawn(probe())
    with anyio.move_on_after(0.01):
        await _ask(worker, "hold", str)
    with anyio.fail_after(STOPPED_S):
        count = await _ask(worker, "cancelled", int)
    expect(count == 1, "cancelling a call tells the role, before any later call", count)
    await worker.stop(STOPPED_S)


async def _roles_are_built_or_refused(case: SpawnerCase, log: Path) -> None:
    clause = "what building a role raises is raised by spawn"
    await expect_raises(ConfigError, clause, lambda: case.spawner.spawn(probe(arguments={"refuse": "no"})))
    missing = probe(path="corrente.nowhere:Role")
    await expect_raises(PipelineError, clause, lambda: case.spawner.spawn(missing))
    try:
        await case.spawner.spawn(probe(arguments={"leave": 3}))
    except WorkerDied as death:
        expect("probe" in str(death) and "leaving" in str(death), "a worker that ends instead is named", death)
    else:
        expect(False, "a worker that ends before its role is built is WorkerDied")


async def _places_are_kept(case: SpawnerCase, log: Path) -> None:
    place = WorkerPlace(threads=3, gpus=("1", "0"), variables={"CORRENTE_PROBE": "yes"})
    worker = await case.spawner.spawn(probe(), place=place)
    for name, value in (("OMP_NUM_THREADS", "3"), ("CUDA_VISIBLE_DEVICES", "1,0"), ("CORRENTE_PROBE", "yes")):
        seen = await _ask(worker, "variable", str, text=name)
        expect(seen == value, f"a place sets {name}", seen)
    await worker.stop(STOPPED_S)


async def _an_exit_is_named(case: SpawnerCase, log: Path) -> None:
    worker = await case.spawner.spawn(probe(), log=log)
    deaths: list[str] = []

    async def wait() -> None:
        deaths.append(str(await worker.ended()))

    async def call() -> None:
        try:
            await _ask(worker, "hold")
        except WorkerDied as death:
            deaths.append(str(death))

    async with anyio.create_task_group() as tasks:
        for waiting in (wait, wait, call, call):
            tasks.start_soon(waiting)
        await anyio.wait_all_tasks_blocked()
        exiting = lambda: _ask(worker, "exit", text="good reasons", number=3)  # noqa: E731
        await expect_raises(WorkerDied, "a worker that exits is WorkerDied in its open calls", exiting)
    expect(len(set(deaths)) == 1 and len(deaths) == 4, "everybody who waits learns the same", deaths)
    expect(deaths[0].startswith(worker.label), "the name of the worker comes first", deaths[0])
    expect("code 3" in deaths[0] and "good reasons" in deaths[0], "then how it ended, and the last it wrote", deaths[0])
    expect(str(log) in deaths[0], "then where its log is", deaths[0])
    await expect_raises(WorkerDied, "a call after the end is WorkerDied", lambda: _ask(worker, "echo"))
    await worker.stop(STOPPED_S)


async def _a_kill_is_noticed(case: SpawnerCase, log: Path) -> None:
    worker = await case.spawner.spawn(probe())
    pid = await _ask(worker, "pid", int)
    began = time.monotonic()
    await expect_raises(WorkerDied, "a worker that is killed is WorkerDied", lambda: _ask(worker, "kill"))
    took_s = time.monotonic() - began
    expect(took_s < NOTICED_S, "a kill is noticed within a second", took_s)
    await worker.stop(STOPPED_S)
    expect(not case.exists(pid), "nothing of it is left")


async def _output_is_logged(case: SpawnerCase, log: Path) -> None:
    worker = await case.spawner.spawn(probe(), log=log)
    await _ask(worker, "write", int, text="line " * 20, number=10_000)
    await worker.stop(STOPPED_S)
    lines = log.read_text().splitlines()
    expect(lines == ["line " * 20] * 10_000, "all that a worker writes is in its log", len(lines))


async def _stop_ends_idle_and_busy(case: SpawnerCase, log: Path) -> None:
    for busy in (False, True):
        worker = await case.spawner.spawn(probe())
        pid = await _ask(worker, "pid", int)
        with anyio.move_on_after(0.05):
            if busy:
                await _ask(worker, "spin")
        with anyio.fail_after(STOPPED_S):
            await worker.stop(STOPPED_S * 2)
            await worker.stop(0)
        expect(not case.exists(pid), "stop ends a worker, also one that computes", busy)
        await expect_raises(WorkerDied, "a stopped worker is WorkerDied", lambda w=worker: _ask(w, "echo"))


async def _stop_kills_what_does_not_hear(case: SpawnerCase, log: Path) -> None:
    worker = await case.spawner.spawn(probe())
    pid = await _ask(worker, "pid", int)
    with anyio.move_on_after(0.05):
        await _ask(worker, "freeze")
    began = time.monotonic()
    with anyio.fail_after(STOPPED_S):
        await worker.stop(0.3)
    took_s = time.monotonic() - began
    expect(took_s >= 0.3, "a worker gets the time it was promised", took_s)
    expect(not case.exists(pid), "a worker that does not end by itself is killed")


async def _isolated_workers_end_with_their_forks(case: SpawnerCase, log: Path) -> None:
    for ending in ("stop", "exit"):
        worker = await case.spawner.spawn(probe(isolated=True))
        pids = [await _ask(worker, "pid", int), await _ask(worker, "fork", int)]
        if ending == "exit":
            await expect_raises(WorkerDied, "it may end by itself", lambda w=worker: _ask(w, "exit", number=1))
        await worker.stop(0)
        with anyio.fail_after(STOPPED_S):  # a process takes a moment to end
            while any(map(case.exists, pids)):
                await anyio.sleep(0.01)


async def _no_worker_outlives_its_caller(case: SpawnerCase, log: Path) -> None:
    if case.abandon is None:
        return
    for changes in ({}, {"isolated": True}, {"cleans_up": True}):
        pid = await case.abandon(probe(**changes))
        with anyio.fail_after(STOPPED_S):
            while case.exists(pid):
                await anyio.sleep(0.01)
