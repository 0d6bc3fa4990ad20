"""Workers as child processes of this one: started, called, watched, stopped.

Calls and answers go over a socket pair that only the two processes hold: no path, no port, nothing to collide with. Closing it is
how a worker is asked to stop, and the kernel closes it when the caller dies, so there is one way to end. On Linux the kernel is
asked to kill a worker together with the thread that started it, the one that runs the event loop.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncGenerator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import anyio
import anyio.to_thread
import msgspec
from anyio.abc import TaskGroup

from corrente.common import rpc
from corrente.common.child_process import STOPS
from corrente.common.rpc_client import OnProgress, RpcClient, ignore_progress
from corrente.common.spawn import ANYWHERE, Spawner, WorkerPlace, WorkerRole
from corrente.common.worker_log import WorkerLog, describe_output
from corrente.common.worker_main import WorkerArgs
from corrente.errors import ConfigError, WorkerDied

LINGER_S = 0.5
"""Time a worker may take between closing its socket and ending, and its last output to arrive after it ended."""

T = TypeVar("T")


class LocalWorker:
    """Implements Worker. ``run`` must be running, in a task that whoever made it keeps until the worker has ended."""

    def __init__(self, role: WorkerRole, process: subprocess.Popen[bytes], link: socket.socket, log: WorkerLog) -> None:
        self._role, self._process, self._link, self._log = role, process, link, log
        self._client = RpcClient(link, label=self.label)
        self._over = anyio.Event()

    @property
    def label(self) -> str:
        return f"{self._role.name} (pid {self._process.pid})"

    @property
    def output(self) -> str:
        return self._log.tail

    async def call(self, body: msgspec.Struct, kind: type[T] | Any, *, on_progress: OnProgress = ignore_progress) -> T:
        """See Worker."""
        return await self._client.call(body, kind, on_progress=on_progress)

    async def ended(self) -> WorkerDied:
        """See Worker."""
        return await self._client.ended()

    async def stop(self, within_s: float) -> None:
        """See Worker. An isolated one is killed with all it started, also where it has ended by itself."""
        self._client.mark_dead(f"{self.label} was stopped")
        self._client.hang_up()
        with anyio.move_on_after(within_s):
            await self._over.wait()
        if not self._over.is_set():
            self._kill()
            await self._over.wait()

    async def run(self) -> None:
        """Carry calls and read output until the process has ended.

        Shielded: when a run is cancelled, its workers are still to be stopped, and what they write meanwhile is to be read, or
        a full pipe keeps them from ending.
        """
        with anyio.CancelScope(shield=True):
            async with anyio.create_task_group() as tasks:
                drained = anyio.Event()
                tasks.start_soon(self._carry)
                tasks.start_soon(self._read_output, drained)
                await self._exit()
                with anyio.move_on_after(LINGER_S):  # a fork of the worker's may hold the pipe open for longer
                    await drained.wait()
                tasks.cancel_scope.cancel()
        self._log.close()
        how = _ending(self._process.returncode)
        output = describe_output(self._log.tail.splitlines(), self._log.path)
        self._client.mark_dead(f"{self.label} {how}; {output}")
        self._link.close()
        assert self._process.stderr is not None
        self._process.stderr.close()
        self._over.set()

    async def _carry(self) -> None:
        """Carry calls until the worker closes its end; one that does so and lives on is killed."""
        try:
            await self._client.run()
        except* (ValueError, msgspec.MsgspecError) as errors:
            self._client.mark_dead(f"{self.label} sent what is no answer ({errors.exceptions[0]})")
            self._kill()
        if not self._client.dead:
            await anyio.sleep(LINGER_S)
            self._kill()

    async def _read_output(self, drained: anyio.Event) -> None:
        assert self._process.stderr is not None
        source = self._process.stderr.fileno()
        while data := await _read_some(source):
            self._log.write(data)
        drained.set()

    async def _exit(self) -> None:
        """Return when the process has ended, and leave no zombie."""
        await _exited(self._process)
        if self._role.isolated:  # kill what it forked; before it is reaped, while its number cannot be another's
            _kill_group(self._process.pid)
        self._process.wait()

    def _kill(self) -> None:
        if self._process.returncode is not None:
            return
        if self._role.isolated:
            _kill_group(self._process.pid)
        else:
            self._process.kill()


class LocalSpawner:
    """Implements Spawner and LocalOnly. ``tasks`` carries the calls of its workers; it ends after the last of them."""

    def __init__(self, tasks: TaskGroup) -> None:
        self._tasks = tasks
        self._descriptors: tuple[int, ...] = ()
        self._workers: set[LocalWorker] = set()

    async def spawn(self, role: WorkerRole, *, place: WorkerPlace = ANYWHERE, log: Path | None = None) -> LocalWorker:
        """See Spawner. Call it in the thread that runs the event loop: workers die with the *thread* that started them."""
        if place.host:
            raise ConfigError(
                f"{role.name}: a worker on host {place.host!r} needs another spawner; this one has one host"
            )
        worker = _start(role, place, WorkerLog(log), self._descriptors)
        self._workers.add(worker)
        self._tasks.start_soon(self._keep, worker)
        try:
            await worker.call(rpc.BuildRole(path=role.path, arguments=role.arguments), None)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await worker.stop(0)
            raise
        return worker

    def inheriting(self, *descriptors: int) -> LocalSpawner:
        """See LocalOnly."""
        other = LocalSpawner(self._tasks)
        other._descriptors, other._workers = (*self._descriptors, *descriptors), self._workers
        return other

    async def close(self) -> None:
        """Kill whatever still runs."""
        async with anyio.create_task_group() as stopping:
            for worker in self._workers:
                stopping.start_soon(worker.stop, 0)

    async def _keep(self, worker: LocalWorker) -> None:
        await worker.run()
        self._workers.discard(worker)


@asynccontextmanager
async def open_local_spawner() -> AsyncGenerator[LocalSpawner]:
    """A spawner for the length of a block; workers that nobody stopped are killed at its end. Errors of the block come out as
    they are."""
    failure: Exception | None = None
    async with anyio.create_task_group() as tasks:
        spawner = LocalSpawner(tasks)
        try:
            yield spawner
        except Exception as error:  # kept, for the task group would wrap it
            failure = error
        finally:
            with anyio.CancelScope(shield=True):
                await spawner.close()
    if failure is not None:
        raise failure


def local_unless(spawner: Spawner | None) -> AbstractAsyncContextManager[Spawner]:
    """``spawner`` itself, or where there is none a local one for the length of a block."""
    return open_local_spawner() if spawner is None else nullcontext(spawner)


def _start(role: WorkerRole, place: WorkerPlace, log: WorkerLog, descriptors: tuple[int, ...]) -> LocalWorker:
    """Start the process. Blocks for the milliseconds that takes."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    args = WorkerArgs(
        name=role.name,
        socket=theirs.fileno(),
        parent=os.getpid(),
        nice=place.nice,
        cpus=place.cpus,
        isolated=role.isolated,
        cleans_up=role.cleans_up,
    )
    path = os.pathsep.join(entry for entry in sys.path if entry)
    command = [sys.executable, "-u", "-P", "-m", "corrente.common.worker_main", msgspec.json.encode(args).decode()]
    try:
        with theirs, _stops_blocked():
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                bufsize=0,
                env={**os.environ, "PYTHONPATH": path, **place.environment()},
                pass_fds=(theirs.fileno(), *descriptors),
                start_new_session=role.isolated,
            )
    except BaseException:
        ours.close()
        log.close()
        raise
    assert process.stderr is not None
    os.set_blocking(process.stderr.fileno(), False)
    return LocalWorker(role, process, ours, log)


def _ending(code: int) -> str:
    """A process's exit status in words."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def _kill_group(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


async def _exited(process: subprocess.Popen[bytes]) -> None:
    """Return when a child has ended; on Linux it is not reaped yet."""
    if not hasattr(os, "pidfd_open"):
        await anyio.to_thread.run_sync(process.wait)
        return
    handle = os.pidfd_open(process.pid)
    try:
        await anyio.wait_readable(handle)
    finally:
        os.close(handle)


async def _read_some(source: int) -> bytes:
    """Some bytes of a non-blocking pipe; none at its end."""
    while True:
        await anyio.wait_readable(source)
        try:
            return os.read(source, rpc.CHUNK_BYTES)
        except BlockingIOError:
            continue


@contextmanager
def _stops_blocked() -> Iterator[None]:
    """Block stop signals while a child starts: it inherits the mask, and unblocks them once it ignores them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
