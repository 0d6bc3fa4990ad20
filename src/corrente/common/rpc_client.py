"""The end that calls: numbered calls over a socket, many open at once, answered in any order.

Frames are handed to the kernel in one piece or queued, so that a cancelled call never leaves half a frame behind; the queue holds
at most what the open calls put there. Who owns the worker says when it is dead (``mark_dead``); from then on no call is answered.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

import anyio
import msgspec

from corrente.common import rpc
from corrente.common.serialization import decode
from corrente.common.waiting import Condition
from corrente.errors import PipelineError, WorkerDied

T = TypeVar("T")

OnProgress = Callable[[], None]
"""Called with each piece that a call has come further."""


def ignore_progress() -> None:
    """The ``OnProgress`` of a call whose caller only waits for the answer."""


class _OpenCall:
    """A call that waits for its answer."""

    def __init__(self, on_progress: OnProgress) -> None:
        self.event = anyio.Event()
        self.on_progress = on_progress
        self.answer: rpc.RpcReply | rpc.RpcFailure | None = None


class RpcClient:
    """The caller's end of a socket, which does not block. ``run`` must be running for calls to be answered.

    ``label`` names the worker in messages. ``on_unasked`` gets answers that belong to no call (their number is 0); without it
    they are a ValueError.
    """

    def __init__(
        self, link: socket.socket, *, label: str, on_unasked: Callable[[rpc.RpcAnswer], None] | None = None
    ) -> None:
        self.label = label
        self._link, self._on_unasked = link, on_unasked
        self._numbers = itertools.count(1)
        self._open: dict[int, _OpenCall] = {}
        self._outbox: deque[memoryview] = deque()
        self._outbox_changed = Condition()
        self._dead = anyio.Event()
        self._death = ""

    async def call(self, body: msgspec.Struct, kind: type[T] | Any, *, on_progress: OnProgress = ignore_progress) -> T:
        """Call with ``body``, and wait for an answer of type ``kind``. May be called from many tasks at once.

        Raises what the worker raised, WorkerDied when it is gone, TypeError for what cannot be sent. Cancelling tells the worker
        that nobody waits any more.
        """
        if self._death:
            raise WorkerDied(self._death)
        number, waiting = next(self._numbers), _OpenCall(on_progress)
        data = rpc.frame(rpc.RpcCall(number, body))
        self._open[number] = waiting
        self._send(data)
        try:
            await waiting.event.wait()
        except anyio.get_cancelled_exc_class():
            self.post(rpc.CancelCall(call=number))
            raise
        finally:
            self._open.pop(number, None)
        if waiting.answer is None:
            raise WorkerDied(self._death)
        if isinstance(waiting.answer, rpc.RpcFailure):
            raise rpc.rebuild(waiting.answer)
        try:
            return decode(waiting.answer.value, kind)
        except msgspec.ValidationError as error:
            raise PipelineError(f"{self.label} answered {type(body).__name__} with something else: {error}") from error

    def post(self, body: msgspec.Struct) -> None:
        """Send what has no answer."""
        self._send(rpc.frame(rpc.RpcCall(0, body)))

    async def run(self) -> None:
        """Carry calls and answers until the worker closes its end. ValueError for what no worker of corrente sends."""
        async with anyio.create_task_group() as group:
            group.start_soon(self._write)
            await self._read()
            group.cancel_scope.cancel()

    def hang_up(self) -> None:
        """End the conversation, which asks a worker to end. The socket itself is its owner's to close."""
        # Not close: a task may be waiting for the descriptor, whose number another file could take meanwhile.
        with contextlib.suppress(OSError):
            self._link.shutdown(socket.SHUT_RDWR)

    def mark_dead(self, reason: str) -> None:
        """The worker is gone: from now on no call is answered. The first reason stands."""
        self._death = self._death or reason
        self._dead.set()
        for waiting in self._open.values():
            waiting.event.set()

    @property
    def dead(self) -> bool:
        """True once ``mark_dead`` was called."""
        return bool(self._death)

    async def ended(self) -> WorkerDied:
        """Return the death of the worker, as soon as it has ended. May be waited for in several tasks."""
        await self._dead.wait()
        return WorkerDied(self._death)

    def _send(self, data: bytes) -> None:
        self._outbox.append(memoryview(data))
        if len(self._outbox) == 1:
            self._flush()
        if self._outbox:
            self._outbox_changed.notify_all()

    def _flush(self) -> None:
        """Give the kernel what it takes now. A worker that is gone takes nothing; its owner notices."""
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
        frames = rpc.FrameReader()
        while data := await self._receive():
            for body in frames.feed(data):
                self._take(decode(body, rpc.RpcAnswer))

    def _take(self, answer: rpc.RpcAnswer) -> None:
        if answer.id == 0:
            if self._on_unasked is None:
                raise ValueError(f"an answer that nobody asked for: {answer}")
            self._on_unasked(answer)
        elif (waiting := self._open.get(answer.id)) is None:
            return  # cancelled meanwhile
        elif isinstance(answer, rpc.RpcProgress):
            waiting.on_progress()
        else:
            waiting.answer = answer
            waiting.event.set()

    async def _receive(self) -> bytes:
        """Some bytes; none when the worker closed its end, which it does only by ending."""
        while True:
            await anyio.wait_readable(self._link)
            try:
                return self._link.recv(rpc.CHUNK_BYTES)
            except BlockingIOError:
                continue
            except OSError:
                return b""

    async def _write(self) -> None:
        while True:
            await self._outbox_changed.wait_for(lambda: bool(self._outbox))
            await anyio.wait_writable(self._link)
            self._flush()
