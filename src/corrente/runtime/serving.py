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
from collections.abc import Iterator
from typing import NoReturn, Protocol

from corrente.runtime import wire
from corrente.runtime.cores import load


class Role(Protocol):
    """What a worker does with its calls.

    ``handle`` serves one call; None: the answer comes later, from ``work``, or never. What it raises is the answer. ``busy`` says
    that there is work to do between calls; ``work`` does a piece of it. What ``work`` raises ends the worker.
    """

    def handle(self, call: wire.Call) -> wire.Answer | None: ...

    def work(self) -> list[wire.Answer]: ...

    @property
    def busy(self) -> bool: ...


class Link:
    """The worker's end of the socket. Sending blocks while the controller does not read."""

    def __init__(self, link: socket.socket) -> None:
        self._socket = link
        self._inbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        threading.Thread(target=self._listen, name="listen", daemon=True).start()

    def calls(self, *, wait: bool) -> Iterator[wire.Call]:
        """Calls that have arrived; with ``wait``, at least one."""
        while True:
            try:
                body = self._inbox.get(block=wait)
            except queue.Empty:
                return
            wait = False
            yield wire.decode(body, wire.Call)

    def send(self, answer: wire.Answer) -> None:
        """Hand an answer to the kernel; ends the process when nobody is there to read it."""
        try:
            self._socket.sendall(wire.frame(answer))
        except ConnectionError:
            os._exit(0)

    def _listen(self) -> NoReturn:
        frames = wire.Frames()
        try:
            while data := self._socket.recv(wire.CHUNK_BYTES):
                for body in frames.feed(data):
                    self._inbox.put(body)
        except ConnectionError:
            os._exit(0)
        except ValueError as error:
            sys.stderr.write(f"ValueError: {error}\n")
            os._exit(1)
        os._exit(0)


def serve(role: Role, link: Link, *, name: str) -> NoReturn:
    """Answer calls, and work between them, until the process ends."""
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
    serve(load(role)(), link, name=name)
