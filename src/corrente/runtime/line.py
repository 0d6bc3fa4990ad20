"""Calls over a socket to a worker, wherever it came from: numbered, many open at once, answered in any order.

Frames are handed to the kernel in one piece or queued, so that a cancelled call never leaves half a frame behind; the queue holds
at most what the open calls put there. Who owns the worker says when it is dead (``mark_dead``); from then on no call is answered.
"""

from __future__ import annotations

import itertools
import socket
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import anyio
import msgspec

from corrente.common.waiting import Condition
from corrente.errors import PipelineError, WorkerDied
from corrente.runtime import wire

T = TypeVar("T")


class Caller(Protocol):
    """Whom a handle speaks through: a Line, or a Child that has one."""

    async def call(self, body: wire.Body, kind: type[T] | Any) -> T: ...

    @property
    def pieces(self) -> int: ...


class _Pending:
    """A call that waits for its answer."""

    def __init__(self) -> None:
        self.event = anyio.Event()
        self.answer: wire.Reply | wire.Failed | None = None


class Line:
    """The controller's end of a socket, which does not block. ``carry`` must be running for calls to be answered."""

    def __init__(self, link: socket.socket, *, label: str) -> None:
        self.label = label
        self._link = link
        self._numbers = itertools.count(1)
        self._pending: dict[int, _Pending] = {}
        self._outbox: deque[memoryview] = deque()
        self._changed = Condition()
        self.death = ""
        """How the worker ended; empty while it lives."""
        self.pieces = 0
        """How many the worker has said its calls have come further."""
        self.unasked: Callable[[wire.Answer], None] = _refuse
        """What is done with an answer that nobody asked for (its number is 0)."""

    async def call(self, body: wire.Body, kind: type[T] | Any) -> T:
        """Ask, and wait for an answer of type ``kind``. Raises what the worker raised, WorkerDied when it is gone.

        Cancelling it tells the worker that nobody waits any more.
        """
        if self.death:
            raise WorkerDied(self.death)
        number, pending = next(self._numbers), _Pending()
        self._pending[number] = pending
        self._send(wire.Rpc(number, body))
        try:
            await pending.event.wait()
        except anyio.get_cancelled_exc_class():
            self._send(wire.Rpc(0, wire.CancelRpc(call=number)))
            raise
        finally:
            self._pending.pop(number, None)
        if pending.answer is None:
            raise WorkerDied(self.death)
        if isinstance(pending.answer, wire.Failed):
            raise wire.rebuild(pending.answer)
        try:
            return wire.decode(pending.answer.value, kind)
        except msgspec.ValidationError as error:
            raise PipelineError(f"{self.label} answered {type(body).__name__} with something else: {error}") from error

    async def carry(self) -> None:
        """Carry calls and answers until the worker closes its end. ValueError for what no worker of corrente sends."""
        async with anyio.create_task_group() as group:
            group.start_soon(self._write)
            await self._read()
            group.cancel_scope.cancel()

    def post(self, body: wire.Body) -> None:
        """Say something that has no answer."""
        self._send(wire.Rpc(0, body))

    def mark_dead(self, death: str) -> None:
        """It is gone: from now on no call is answered."""
        self.death = death
        for pending in self._pending.values():
            pending.event.set()

    def hang_up(self) -> None:
        """Close the socket, which is how a worker is asked to end."""
        self._link.close()

    def _send(self, call: wire.Rpc) -> None:
        self._outbox.append(memoryview(wire.frame(call)))
        if len(self._outbox) == 1:
            self._flush()
        if self._outbox:
            self._changed.notify_all()

    def _flush(self) -> None:
        """Give the kernel what it takes now. A worker that is gone takes nothing; its owner says so."""
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

    async def _read(self) -> None:
        frames = wire.Frames()
        while data := await self._receive():
            for body in frames.feed(data):
                answer: wire.Answer = wire.decode(body, wire.Answer)
                if isinstance(answer, wire.Going):
                    self.pieces += 1
                elif answer.id == 0:
                    self.unasked(answer)
                elif (pending := self._pending.get(answer.id)) is not None:
                    pending.answer = answer
                    pending.event.set()

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
            await self._changed.wait_for(lambda: bool(self._outbox))
            await anyio.wait_writable(self._link)
            self._flush()


def _refuse(answer: wire.Answer) -> None:
    raise ValueError(f"an answer that nobody asked for: {answer}")
