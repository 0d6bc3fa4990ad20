"""The end that answers: a worker process serves a role, one call after the other.

Two ways to read calls. With a listening thread, beside the one that computes: the process ends the moment the caller's end of the
socket closes, whatever the computing thread is in the middle of. That is both how a worker is asked to stop and why none outlives
its caller. Without one (``isolated`` workers): the process has a single thread, so what it runs may fork, and use signals.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, Protocol

import msgspec

from corrente.common import rpc
from corrente.common.imports import load_object
from corrente.common.serialization import decode

Send = Callable[[rpc.RpcAnswer], None]


class Role(Protocol):
    """Serves the calls to a worker. Built as ``make(send, **arguments)``; ``send`` may be called from any thread.

    - ``requests`` is the type of the messages it takes: a union of tagged structs, rpc.CancelCall among them.
    - ``handle`` serves one call. None: the answer comes later, from ``work`` or through ``send``, or never. What it raises is the
      answer.
    - ``busy`` says that there is work to do between calls; ``work`` does a piece of it, and is asked after every call. What it
      raises ends the worker.
    - ``close`` is called when the caller is gone, perhaps from another thread than the rest; the process ends when it returns.

    A role may also have ``start_concurrently(call) -> bool``. It is called first, in the thread that reads calls: True when it
    has begun to serve the call outside the computing thread, and will answer through ``send``. It must not block.
    """

    @property
    def requests(self) -> Any: ...

    def handle(self, call: rpc.RpcCall[Any]) -> rpc.RpcAnswer | None: ...

    def work(self) -> list[rpc.RpcAnswer]: ...

    @property
    def busy(self) -> bool: ...

    def close(self) -> None: ...


class RpcServer:
    """The worker's end of a socket. Sending blocks while the caller does not read; any thread may send.

    ``requests``: type of the messages that calls may carry; to be changed only before a caller is answered.
    ``listening_thread``: see the module. ``on_close`` is called once when the caller's end is closed; then the process ends.
    """

    def __init__(self, link: socket.socket, *, requests: Any, listening_thread: bool = True) -> None:
        self._link, self.requests = link, requests
        self.on_close: Callable[[], None] = lambda: None
        self.start_concurrently: Callable[[rpc.RpcCall[Any]], bool] = lambda call: False
        """See Role."""
        self._inbox: queue.SimpleQueue[rpc.RpcCall[Any]] = queue.SimpleQueue()
        self._frames = rpc.FrameReader()
        self._whole_frames = threading.Lock()
        self._listening_thread = listening_thread
        if listening_thread:
            threading.Thread(target=self._listen, name="listen", daemon=True).start()

    def calls(self, *, wait: bool) -> Iterator[rpc.RpcCall[Any]]:
        """Calls that have arrived; with ``wait``, at least one."""
        while (call := self._next(wait=wait)) is not None:
            wait = False
            yield call

    def send(self, answer: rpc.RpcAnswer) -> None:
        """Hand an answer to the kernel. An answer that nobody is there to read is dropped: whoever reads calls notices."""
        data = rpc.frame(answer)
        with self._whole_frames, contextlib.suppress(ConnectionError):
            self._link.sendall(data)

    def post(self, body: Any) -> None:
        """Queue a call of the worker's own, as if the caller had made it. Safe in a signal handler."""
        self._inbox.put(rpc.RpcCall(0, body))

    def _next(self, *, wait: bool) -> rpc.RpcCall[Any] | None:
        """The next call; None when there is none, and ``wait`` is not asked for."""
        while True:
            try:
                return self._inbox.get(block=wait and self._listening_thread)
            except queue.Empty:
                if self._listening_thread or not self._receive(wait=wait):
                    return None

    def _listen(self) -> NoReturn:
        while True:
            self._receive(wait=True)

    def _receive(self, *, wait: bool) -> bool:
        """Take what has arrived from the socket; False when nothing has. Does not return when the caller is gone."""
        kind: Any = rpc.RpcCall
        try:
            data = self._link.recv(rpc.CHUNK_BYTES, 0 if wait else socket.MSG_DONTWAIT)
            for body in self._frames.feed(data):
                call = decode(body, kind[self.requests])
                if not self.start_concurrently(call):
                    self._inbox.put(call)
        except BlockingIOError:
            return False
        except ConnectionError:
            self._leave()
        except (ValueError, msgspec.MsgspecError) as error:
            sys.stderr.write(f"{type(error).__name__}: {error}\n")
            os._exit(1)
        if not data:
            self._leave()
        return True

    def _leave(self) -> NoReturn:
        try:
            self.on_close()
        finally:
            os._exit(0)


def serve(role: Role, server: RpcServer, *, name: str) -> NoReturn:
    """Answer calls, and work between them, until the process ends."""
    while True:
        for call in server.calls(wait=not role.busy):
            try:
                answer = role.handle(call)
            except Exception as error:
                answer = rpc.failure(call.id, error, worker=name)
            if answer is not None:
                server.send(answer)
        for answer in role.work():
            server.send(answer)


def run_worker(name: str, link: socket.socket, *, isolated: bool = False) -> NoReturn:
    """Build the role that the first call over ``link`` asks for, and serve it until the caller is gone: the program of a worker,
    whoever started it and however ``link`` was connected."""
    if isolated:
        os.register_at_fork(after_in_child=link.close)  # a fork of the user's must not keep the connection open
    server = RpcServer(link, requests=rpc.BuildRole, listening_thread=not isolated)
    role = _build(server, name)
    serve(role, server, name=name)


def _build(server: RpcServer, name: str) -> Role:
    while True:
        for call in server.calls(wait=True):
            try:
                role: Role = load_object(call.body.path)(server.send, **call.body.arguments)
            except Exception as error:
                server.send(rpc.failure(call.id, error, worker=name))
            else:
                server.requests, server.on_close = role.requests, role.close
                server.start_concurrently = getattr(role, "start_concurrently", server.start_concurrently)
                server.send(rpc.reply(call.id, None))
                return role
