"""The program behind ``corrente engine --join RUN_FOLDER``: an engine that goes to a run by itself.

It greets the controller, takes the run's config, and serves like a child from then on. Ctrl-C leaves: what it is at goes on in
other engines, from where it is; a second one leaves at once. It ends when the run does.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from pathlib import Path
from types import FrameType
from typing import NoReturn

import msgspec

from corrente.errors import ConfigError, PipelineError
from corrente.runtime import greeting, wire
from corrente.runtime.engine_worker import EngineRole
from corrente.runtime.greeting import Hello, Refused, Welcome
from corrente.runtime.placement import BASE_NICE, WorkerPlace, available_cpus, environment
from corrente.runtime.serving import Link, Send, serve

GREETING_S = 30.0
LEAVING = "left the run; what was under way goes on in other engines"


class GuestRole(EngineRole):
    """An engine that may leave, and may be sent away. ``model``: where it has the model, where that is not the run's place."""

    def __init__(self, send: Send, *, model: Path | None = None) -> None:
        super().__init__(send)
        self._model = model

    def handle(self, call: wire.Rpc) -> wire.Answer | None:
        match call.body:
            case wire.Start(config=config) if self._model is not None:
                section = msgspec.structs.replace(config.model, path=str(self._model))
                moved = msgspec.structs.replace(call.body, config=msgspec.structs.replace(config, model=section))
                return super().handle(wire.Rpc(call.id, moved))
            case wire.Leave():
                return wire.reply(0, None)
            case wire.Dismiss(why=why):
                sys.stderr.write(f"corrente: {' '.join(why.split())}\n")
                sys.stderr.flush()
                os._exit(2)
            case _:
                return super().handle(call)


def join(folder: Path, *, model: Path | None = None, threads: int = 0) -> NoReturn:
    """Serve the run in ``folder`` until it ends, or until told to leave. ConfigError and PipelineError when it lets nobody in,
    or not this engine; exits with code 2 when it turns out to be another model."""
    place = WorkerPlace(cpus=available_cpus(), threads=threads or len(available_cpus()), nice=BASE_NICE)
    os.environ.update(environment(place, os.environ))
    connection = _connect(folder)
    try:
        token = (folder / greeting.TOKEN).read_text()
    except OSError as error:
        raise PipelineError(f"--join: the token of {folder} cannot be read: {error.strerror}") from error
    hello = Hello(token=token, pid=os.getpid(), model=greeting.fingerprint(model) if model is not None else "")
    welcome = _greet(connection, hello)
    os.nice(BASE_NICE)
    link = Link(connection, farewell="the run has ended")
    _leave_when_asked(link)
    sys.stderr.write(f"{folder}: joining as {welcome.name}; Ctrl-C leaves\n")
    serve(GuestRole(link.send, model=model), link, name=welcome.name)


def _connect(folder: Path) -> socket.socket:
    if not folder.is_dir():
        raise ConfigError(f"--join: {folder} is not a folder; give that of a run, such as runs/NAME")
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with greeting.address(folder) as path:
            connection.connect(path)
    except OSError as error:
        connection.close()
        raise PipelineError(
            f"--join: no run that goes on in {folder} lets engines join ({error.strerror}); it needs pool.join = true"
        ) from error
    return connection


def _greet(connection: socket.socket, hello: Hello) -> Welcome:
    """Say who we are, and hear what the controller thinks of it."""
    connection.settimeout(GREETING_S)
    try:
        connection.sendall(wire.frame(hello))
        answer = wire.decode(_one_frame(connection), Welcome | Refused)
    except OSError as error:
        raise PipelineError(f"--join: the run does not answer: {error}") from error
    if isinstance(answer, Refused):
        raise (ConfigError if answer.wrong else PipelineError)(f"--join: {answer.why}")
    connection.settimeout(None)
    return answer


def _one_frame(connection: socket.socket) -> bytes:
    """The next frame, and not a byte of what comes after it: that is for somebody else."""
    frames = wire.Frames()
    while True:
        data = connection.recv(1)
        if not data:
            raise PipelineError("--join: the run hung up; has it just ended?")
        if bodies := frames.feed(data):
            return bodies[0]


def _leave_when_asked(link: Link) -> None:
    def leave(signum: int, frame: FrameType | None) -> None:
        if link.farewell == LEAVING:
            os._exit(130)
        link.farewell = LEAVING
        link.post(wire.Leave())

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, leave)
