"""One worker process, from the controller's side: start it, call it, notice its death, stop it.

Calls and answers go over a socket pair that only the two processes hold: no path, no port, nothing to collide with. Closing
it is how a worker is asked to stop, and the kernel closes it when the controller dies, so there is one way to end. A worker
that ends by itself raises WorkerDied where ``watch`` runs, and in every call that waits for it.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import anyio
import anyio.to_thread
import msgspec

from corrente.common.child_process import STOPS
from corrente.errors import WorkerDied
from corrente.runtime import wire
from corrente.runtime.line import Line
from corrente.runtime.placement import WorkerPlace, environment
from corrente.runtime.worker import WorkerArgs

LAST_WORDS = 3
LINGER_S = 0.5
"""How long a worker may take between closing its socket and ending, and its last words to arrive after it ended."""

T = TypeVar("T")


class Child:
    """A started worker. ``stop`` must be called, also after the worker died."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], link: socket.socket, log: Path | None) -> None:
        self.name, self._process, self._log = name, process, log
        self._line = Line(link, label=self.label)
        self._words: deque[str] = deque(maxlen=LAST_WORDS)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def label(self) -> str:
        return f"{self.name} (pid {self.pid})"

    @classmethod
    def spawn(
        cls, name: str, *, role: str, place: WorkerPlace, inherit: Sequence[int] = (), log: Path | None = None
    ) -> Child:
        """Start a worker that inherits the descriptors ``inherit``; it waits for a Start. ``log`` gets what it writes to
        its standard output and error. Blocks for the milliseconds that takes: the worker dies with the *thread* that
        started it, so that thread must be the one that runs the event loop."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        birth = WorkerArgs(
            name=name, role=role, socket=theirs.fileno(), parent=os.getpid(), nice=place.nice, cpus=place.cpus
        )
        path = os.pathsep.join(entry for entry in sys.path if entry)
        command = [sys.executable, "-u", "-P", "-m", "corrente.runtime.worker", msgspec.json.encode(birth).decode()]
        try:
            with theirs, _stops_blocked():
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    bufsize=0,
                    env={**environment(place, os.environ), "PYTHONPATH": path},
                    pass_fds=(theirs.fileno(), *inherit),
                )
        except BaseException:
            ours.close()
            raise
        assert process.stderr is not None
        os.set_blocking(process.stderr.fileno(), False)
        return cls(name, process, ours, log)

    @property
    def pieces(self) -> int:
        """See Line."""
        return self._line.pieces

    async def call(self, body: wire.Body, kind: type[T] | Any) -> T:
        """See Line.call. May be called from many tasks at once; answers come in any order."""
        return await self._line.call(body, kind)

    # ---- life

    async def watch(self) -> None:
        """Carry calls and answers until the worker ends; then raise WorkerDied with how it ended and its last words."""
        async with anyio.create_task_group() as group:
            heard = anyio.Event()
            group.start_soon(self._carry)
            group.start_soon(self._listen, heard)
            await _ended(self._process)
            with anyio.move_on_after(LINGER_S):
                await heard.wait()
            group.cancel_scope.cancel()
        self._line.mark_dead(f"{self.label} {_ending(self._process.returncode)}; {self._testament()}")
        raise WorkerDied(self._line.death)

    async def stop(self, within_s: float) -> None:
        """Ask it to end, then insist: SIGKILL after ``within_s``. Returns when it is gone.

        To be called, and not cancelled, when ``watch`` runs no more.
        """
        self._line.mark_dead(self._line.death or f"{self.label} was stopped")
        self._line.hang_up()
        with anyio.move_on_after(within_s) as patience:
            await _ended(self._process)
        if patience.cancelled_caught:
            self._process.kill()
            await _ended(self._process)
        assert self._process.stderr is not None
        self._process.stderr.close()

    async def _carry(self) -> None:
        await self._line.carry()
        await anyio.sleep(LINGER_S)
        self._process.kill()

    async def _listen(self, heard: anyio.Event) -> None:
        """Keep the last lines the worker wrote, and all of them in its log."""
        assert self._process.stderr is not None
        source, rest = self._process.stderr.fileno(), b""
        with _appending(self._log) as log:
            while chunk := await _read_some(source):
                if log is not None:
                    log.write(chunk)
                *lines, rest = (rest + chunk)[-wire.CHUNK_BYTES :].split(b"\n")
                self._words += [line.decode(errors="replace") for line in lines if line.strip()]
        if rest.strip():
            self._words.append(rest.decode(errors="replace"))
        heard.set()

    def _testament(self) -> str:
        said = " / ".join(line.strip() for line in self._words)
        where = f" (all of it in {self._log})" if self._log is not None else ""
        return f"last words: {said}{where}" if said else f"it left no word{where}"


def _ending(code: int | None) -> str:
    """How a process ended, in words."""
    if code is not None and code < 0:
        try:
            return f"was killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"was killed by signal {-code}"
    return f"exited with code {code}"


async def _ended(process: subprocess.Popen[bytes]) -> None:
    """Return when the process has ended, and leave no zombie. Safe to cancel, and to wait for in several tasks."""
    if process.poll() is not None:
        return
    if not hasattr(os, "pidfd_open"):
        await anyio.to_thread.run_sync(process.wait, abandon_on_cancel=True)
        return
    handle = os.pidfd_open(process.pid)
    try:
        await anyio.wait_readable(handle)
    finally:
        os.close(handle)
    process.wait()


async def _read_some(source: int) -> bytes:
    """Some bytes of a non-blocking pipe; none at its end."""
    while True:
        await anyio.wait_readable(source)
        try:
            return os.read(source, wire.CHUNK_BYTES)
        except BlockingIOError:
            continue


@contextmanager
def _stops_blocked() -> Iterator[None]:
    """A child inherits the signal mask: what asks the run to stop reaches it only after it has said that it does not heed it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _appending(path: Path | None) -> Iterator[Any]:
    """An unbuffered log file, or nothing."""
    if path is None:
        yield None
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab", buffering=0) as file:
        yield file
