"""How a worker serves: one thread computes, one listens.

The listener queues calls, and ends the process the moment the controller's end of the socket closes, whatever the other
thread is in the middle of: that is both how a worker is asked to stop and why none outlives its controller.
"""

from __future__ import annotations

import os
import queue
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from typing import NoReturn, Protocol

import msgspec

from corrente.common.imports import load_object
from corrente.runtime import wire

Send = Callable[[wire.Answer], None]


class Role(Protocol):
    """What a worker does with its calls; built with ``Send``, which may be called from any thread.

    ``handle`` serves one call; None: the answer comes later, from ``work`` or through Send, or never. What it raises is the
    answer. ``busy`` says that there is work to do between calls; ``work`` does a piece of it, and is asked after every call. What
    it raises ends the worker.

    ``start_beside`` is asked first, in the thread that listens: True when it has begun to serve the call beside the computing
    thread, and will answer through Send. It must not block.
    """

    def handle(self, call: wire.Rpc) -> wire.Answer | None: ...

    def start_beside(self, call: wire.Rpc) -> bool: ...

    def work(self) -> list[wire.Answer]: ...

    @property
    def busy(self) -> bool: ...


class Link:
    """The worker's end of the socket. Sending blocks while the controller does not read; any thread may send.

    ``farewell`` is written to standard error when the process ends because the controller's end is closed.
    """

    def __init__(self, link: socket.socket, *, farewell: str = "") -> None:
        self._socket, self.farewell = link, farewell
        self._inbox: queue.SimpleQueue[wire.Rpc] = queue.SimpleQueue()
        self.start_beside: Callable[[wire.Rpc], bool] = lambda call: False
        """See Role; set before the first call that it takes can come."""
        self._whole_frames = threading.Lock()
        threading.Thread(target=self._listen, name="listen", daemon=True).start()

    def calls(self, *, wait: bool) -> Iterator[wire.Rpc]:
        """Calls that have arrived; with ``wait``, at least one."""
        while True:
            try:
                call = self._inbox.get(block=wait)
            except queue.Empty:
                return
            wait = False
            yield call

    def send(self, answer: wire.Answer) -> None:
        """Hand an answer to the kernel; ends the process when nobody is there to read it."""
        try:
            with self._whole_frames:
                self._socket.sendall(wire.frame(answer))
        except ConnectionError:
            self._leave()

    def post(self, body: wire.Body) -> None:
        """Queue a call of the worker's own, as if the controller had made it. Safe in a signal handler."""
        self._inbox.put(wire.Rpc(0, body))

    def _leave(self) -> NoReturn:
        """End the process. Either thread may notice first; the farewell is said once."""
        farewell, self.farewell = self.farewell, ""
        if farewell:
            sys.stderr.write(f"{farewell}\n")
            sys.stderr.flush()
        os._exit(0)

    def _listen(self) -> NoReturn:
        frames = wire.Frames()
        try:
            while data := self._socket.recv(wire.CHUNK_BYTES):
                for body in frames.feed(data):
                    call = wire.decode(body, wire.Rpc)
                    if not self.start_beside(call):
                        self._inbox.put(call)
        except ConnectionError:
            self._leave()
        except (ValueError, msgspec.MsgspecError) as error:
            sys.stderr.write(f"{type(error).__name__}: {error}\n")
            os._exit(1)
        self._leave()


def serve(role: Role, link: Link, *, name: str) -> NoReturn:
    """Answer calls, and work between them, until the process ends."""
    link.start_beside = role.start_beside
    while True:
        for call in link.calls(wait=not role.busy):
            try:
                answer = role.handle(call)
            except Exception as error:
                answer = wire.failure(call.id, error, worker=name)
            if answer is not None:
                link.send(answer)
        for answer in role.work():
            link.send(answer)


def run(name: str, *, role: str, socket_fd: int) -> NoReturn:
    """Serve the role of that dotted path on an inherited socket."""
    link = Link(socket.socket(fileno=socket_fd))
    serve(load_object(role)(link.send), link, name=name)
