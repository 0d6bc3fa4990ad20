"""One worker process, from the controller's side: start it, call it, notice its death, stop it.

Calls and answers go over a socket pair that only the two processes hold: no path, no port, nothing to collide with. Closing
it is how a worker is asked to stop, and the kernel closes it when the controller dies, so there is one way to end. A worker
that ends by itself raises WorkerDied where ``watch`` runs, and in every call that waits for it.
"""

from __future__ import annotations

import itertools
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

from corrente.errors import PipelineError, WorkerDied
from corrente.runtime import wire
from corrente.runtime.placement import Place, environment
from corrente.runtime.worker import Birth
from corrente.waiting import Bell

LAST_WORDS = 3
LINGER_S = 0.5
"""How long a worker may take between closing its socket and ending, and its last words to arrive after it ended."""

T = TypeVar("T")


class _Pending:
    """A call that waits for its answer."""

    def __init__(self) -> None:
        self.event = anyio.Event()
        self.answer: wire.Answer | None = None


class Child:
    """A started worker. Calls may be made from many tasks at once; they are answered in any order.

    Frames are handed to the kernel in one piece or queued, so that a cancelled call never leaves half a frame behind; the
    queue holds at most what the open calls put there. ``stop`` must be called, also after the worker died.
    """

    def __init__(self, name: str, process: subprocess.Popen[bytes], link: socket.socket, log: Path | None) -> None:
        self.name, self._process, self._link, self._log = name, process, link, log
        self._numbers = itertools.count(1)
        self._pending: dict[int, _Pending] = {}
        self._outbox: deque[memoryview] = deque()
        self._bell = Bell()
        self._words: deque[str] = deque(maxlen=LAST_WORDS)
        self._death: str = ""

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def label(self) -> str:
        return f"{self.name} (pid {self.pid})"

    @classmethod
    def spawn(
        cls, name: str, *, role: str, place: Place, inherit: Sequence[int] = (), log: Path | None = None
    ) -> Child:
        """Start a worker that inherits the descriptors ``inherit``; it waits for a Start. ``log`` gets what it writes to
        its standard output and error. Blocks for the milliseconds that takes: the worker dies with the *thread* that
        started it, so that thread must be the one that runs the event loop."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        birth = Birth(
            name=name, role=role, socket=theirs.fileno(), parent=os.getpid(), nice=place.nice, cpus=place.cpus
        )
        path = os.pathsep.join(entry for entry in sys.path if entry)
        command = [sys.executable, "-u", "-P", "-m", "corrente.runtime.worker", msgspec.json.encode(birth).decode()]
        try:
            with theirs, _interrupts_blocked():
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

    # ---- calls

    async def call(self, body: wire.Body, kind: type[T] | Any) -> T:
        """Ask, and wait for an answer of type ``kind``. Raises what the worker raised, WorkerDied when it is gone.

        Cancelling it tells the worker that nobody waits any more.
        """
        if self._death:
            raise WorkerDied(self._death)
        number, pending = next(self._numbers), _Pending()
        self._pending[number] = pending
        self._send(wire.Call(number, body))
        try:
            await pending.event.wait()
        except anyio.get_cancelled_exc_class():
            self._send(wire.Call(0, wire.Cancel(call=number)))
            raise
        finally:
            self._pending.pop(number, None)
        if pending.answer is None:
            raise WorkerDied(self._death)
        if isinstance(pending.answer, wire.Failed):
            raise wire.rebuild(pending.answer)
        try:
            return wire.decode(pending.answer.value, kind)
        except msgspec.ValidationError as error:
            raise PipelineError(f"{self.label} answered {type(body).__name__} with something else: {error}") from error

    def _send(self, call: wire.Call) -> None:
        self._outbox.append(memoryview(wire.frame(call)))
        if len(self._outbox) == 1:
            self._flush()
        if self._outbox:
            self._bell.ring()

    def _flush(self) -> None:
        """Give the kernel what it takes now. A worker that is gone takes nothing; ``watch`` says so."""
        try:
            while self._outbox:
                sent = self._link.send(self._outbox[0])
                if sent < len(self._outbox[0]):
                    self._outbox[0] = self._outbox[0][sent:]
                else:
                    self._outbox.popleft()
        except BlockingIOError:
            return
        except OSError:
            self._outbox.clear()

    # ---- life

    async def watch(self) -> None:
        """Carry calls and answers until the worker ends; then raise WorkerDied with how it ended and its last words."""
        async with anyio.create_task_group() as group:
            heard = anyio.Event()
            group.start_soon(self._read)
            group.start_soon(self._write)
            group.start_soon(self._listen, heard)
            await _ended(self._process)
            with anyio.move_on_after(LINGER_S):
                await heard.wait()
            group.cancel_scope.cancel()
        self._bury(f"{self.label} {_ending(self._process.returncode)}; {self._testament()}")
        raise WorkerDied(self._death)

    async def stop(self, within_s: float) -> None:
        """Ask it to end, then insist: SIGTERM after 4/5 of ``within_s``, SIGKILL after all of it. Returns when it is gone.

        To be called, and not cancelled, when ``watch`` runs no more.
        """
        self._bury(self._death or f"{self.label} was stopped")
        self._link.close()
        for patience_s, insist in ((0.8 * within_s, self._process.terminate), (0.2 * within_s, self._process.kill)):
            with anyio.move_on_after(patience_s):
                await _ended(self._process)
                break
            insist()
        await _ended(self._process)
        assert self._process.stderr is not None
        self._process.stderr.close()

    def _bury(self, death: str) -> None:
        """From now on no call is answered."""
        self._death = death
        for pending in self._pending.values():
            pending.event.set()

    async def _read(self) -> None:
        frames = wire.Frames()
        while data := await self._receive():
            for body in frames.feed(data):
                answer: wire.Answer = wire.decode(body, wire.Answer)
                if (pending := self._pending.get(answer.id)) is not None:
                    pending.answer = answer
                    pending.event.set()
        await anyio.sleep(LINGER_S)
        self._process.kill()

    async def _receive(self) -> bytes:
        """Some bytes; none when the worker closed its end, which it does only by ending."""
        while True:
            await anyio.wait_readable(self._link)
            try:
                return self._link.recv(wire.CHUNK_BYTES)
            except BlockingIOError:
                continue
            except ConnectionError:
                return b""

    async def _write(self) -> None:
        while True:
            await self._bell.until(lambda: bool(self._outbox))
            await anyio.wait_writable(self._link)
            self._flush()

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
def _interrupts_blocked() -> Iterator[None]:
    """A child inherits the signal mask: Ctrl-C reaches it only after it has said that it ignores it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
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
