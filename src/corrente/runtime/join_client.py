"""The program behind ``corrente engine --join RUN_FOLDER``: an engine that goes to a run by itself.

It introduces itself to the controller, takes the run's config, and from then on serves like a worker that was started. Ctrl-C
leaves: its requests go on in other engines, from where they are; a second one leaves at once. It ends when the run does.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import NoReturn

import msgspec

from corrente.common import rpc
from corrente.common.rpc_server import RpcServer, Send, serve
from corrente.common.serialization import decode
from corrente.common.spawn import WorkerPlace
from corrente.errors import ConfigError, PipelineError
from corrente.runtime import handshake, wire
from corrente.runtime.engine_worker import EngineRole
from corrente.runtime.handshake import Hello, Refused, Welcome
from corrente.runtime.placement import BASE_NICE, available_cpus, computing_place

HANDSHAKE_S = 30.0
LEAVING = "left the run; what was under way goes on in other engines"
RUN_ENDED = "the run has ended"


class JoinedEngineRole(EngineRole):
    """An engine that may leave, and may be dismissed. ``model``: where it has the model, where that is not the run's place."""

    def __init__(self, send: Send, *, model: Path | None = None) -> None:
        super().__init__(send)
        self._model = model
        self.parting = RUN_ENDED
        """Written to standard error when the connection ends."""

    def handle(self, call: rpc.RpcCall[wire.Body]) -> rpc.RpcAnswer | None:
        match call.body:
            case wire.Start(config=config) if self._model is not None:
                section = msgspec.structs.replace(config.model, path=str(self._model))
                moved = msgspec.structs.replace(call.body, config=msgspec.structs.replace(config, model=section))
                return super().handle(rpc.RpcCall(call.id, moved))
            case wire.Leave():
                return rpc.reply(0, None)
            case wire.Dismiss(why=why):
                sys.stderr.write(f"corrente: {' '.join(why.split())}\n")
                sys.stderr.flush()
                os._exit(2)
            case _:
                return super().handle(call)

    def close(self) -> None:
        """See Role."""
        sys.stderr.write(f"{self.parting}\n")
        sys.stderr.flush()


def join_run(folder: Path, *, model: Path | None = None, threads: int = 0) -> NoReturn:
    """Serve the run in ``folder`` until it ends, or until told to leave. ConfigError and PipelineError when it lets nobody in,
    or not this engine; exits with code 2 when it turns out to be another model."""
    cpus = available_cpus()
    place = computing_place(WorkerPlace(cpus=cpus, threads=threads or len(cpus), nice=BASE_NICE), os.environ)
    os.environ.update(place.environment())
    connection = _connect(folder)
    try:
        token = (folder / handshake.TOKEN).read_text()
    except OSError as error:
        raise PipelineError(f"--join: the token of {folder} cannot be read: {error.strerror}") from error
    hello = Hello(token=token, pid=os.getpid(), model=handshake.fingerprint(model) if model is not None else "")
    welcome = _introduce(connection, hello)
    os.nice(BASE_NICE)
    server = RpcServer(connection, requests=wire.Body)
    role = JoinedEngineRole(server.send, model=model)
    server.on_close = role.close
    _leave_on_signals(role, server.post)
    sys.stderr.write(f"{folder}: joining as {welcome.name}; Ctrl-C leaves\n")
    serve(role, server, name=welcome.name)


def _connect(folder: Path) -> socket.socket:
    if not folder.is_dir():
        raise ConfigError(f"--join: {folder} is not a folder; give that of a run, such as runs/NAME")
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with handshake.socket_path(folder) as path:
            connection.connect(path)
    except OSError as error:
        connection.close()
        raise PipelineError(
            f"--join: no run that goes on in {folder} lets engines join ({error.strerror}); it needs pool.join = true"
        ) from error
    return connection


def _introduce(connection: socket.socket, hello: Hello) -> Welcome:
    """Send who we are; returns the controller's welcome, raises its refusal."""
    connection.settimeout(HANDSHAKE_S)
    try:
        connection.sendall(rpc.frame(hello))
        answer = decode(_one_frame(connection), Welcome | Refused)
    except OSError as error:
        raise PipelineError(f"--join: the run does not answer: {error}") from error
    if isinstance(answer, Refused):
        raise (ConfigError if answer.wrong else PipelineError)(f"--join: {answer.why}")
    connection.settimeout(None)
    return answer


def _one_frame(connection: socket.socket) -> bytes:
    """The next frame, and not a byte of what follows it, which the RpcServer is to read."""
    frames = rpc.FrameReader()
    while True:
        data = connection.recv(1)
        if not data:
            raise PipelineError("--join: the run hung up; has it just ended?")
        if bodies := frames.feed(data):
            return bodies[0]


def _leave_on_signals(role: JoinedEngineRole, post: Callable[[wire.Leave], None]) -> None:
    def leave(signum: int, frame: FrameType | None) -> None:
        if role.parting == LEAVING:
            os._exit(130)
        role.parting = LEAVING
        post(wire.Leave())

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, leave)
