"""Engines that come by themselves (``corrente engine --join RUN_FOLDER``), from the controller's side.

Who knows the run's token, runs the same corrente and wants the same weights becomes one more replica of the pool; it is caught up
before it gets requests, gives back what it is at when it leaves, and is not replaced. Nothing an engine that joins does wrong
ends the run. This host only: weights that lie in shared memory are opened through /proc.
"""

from __future__ import annotations

import hmac
import secrets
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NoReturn

import anyio
import msgspec
from anyio.abc import TaskStatus

from corrente.config import Procs, RunConfig
from corrente.engine.launcher import Replica, SharedWeights, Tell
from corrente.errors import CorrenteError, PipelineError, WorkerDied
from corrente.runtime import greeting, wire
from corrente.runtime.failures import as_one
from corrente.runtime.greeting import Hello, Refused, Welcome
from corrente.runtime.handles import ProcEngine
from corrente.runtime.launching import ExitWatcher, prepare, ready_within
from corrente.runtime.line import Line
from corrente.version import __version__

GREETING_S = 10.0
"""How long a connection may take to say who it is."""
DISMISSAL_S = 2.0
BREATH_S = 0.1
MOST_AT_ONCE = 8
"""Connections that have not said who they are yet."""


class JoinServer:
    """Lets engines in, while ``run`` runs. ``factory`` is what they build their core with; ``pool`` is who adopts them."""

    def __init__(
        self, folder: Path, config: RunConfig, *, factory: str, weights: SharedWeights, pool: Any, tell: Tell
    ) -> None:
        self._folder, self._config, self._factory = folder, config, factory
        self._weights, self._pool, self._tell = weights, pool, tell
        self._token = secrets.token_hex(32)
        self._model = greeting.fingerprint(Path(config.model.path))
        self._greeting = anyio.CapacityLimiter(MOST_AT_ONCE)
        self._count = 0

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Listen in the run folder; the socket and the token are gone when this ends."""
        self._folder.mkdir(parents=True, exist_ok=True)
        try:
            server = greeting.listen(self._folder, self._token)
        except OSError as error:
            raise PipelineError(f"pool.join: no socket can be made in {self._folder}: {error.strerror}") from error
        try:
            with server:
                async with anyio.create_task_group() as guests:
                    task_status.started()
                    while True:
                        await anyio.wait_readable(server)
                        try:
                            connection, _ = server.accept()
                        except OSError:
                            await anyio.sleep(BREATH_S)
                            continue
                        connection.setblocking(False)
                        guests.start_soon(self._receive, connection)
        finally:
            greeting.forget(self._folder)

    async def _receive(self, connection: socket.socket) -> None:
        """One connection, from its greeting to its end."""
        line: Line | None = None
        name = ""
        with connection:
            async with self._greeting:
                with anyio.move_on_after(GREETING_S):
                    hello = await _first_words(connection)
                    answer = self._judge(hello)
                    await _say(connection, answer)
                    if hello is not None and isinstance(answer, Welcome):
                        name, line = answer.name, Line(connection, label=f"{answer.name} (pid {hello.pid})")
            if line is not None:
                await self._pool.adopt(self._joining(line, name))

    def _judge(self, hello: Hello | None) -> Welcome | Refused:
        if hello is None or not hmac.compare_digest(hello.token.encode(), self._token.encode()):
            return Refused(why=f"the token is not this run's; read {self._folder / greeting.TOKEN} again")
        if hello.version != __version__:
            return Refused(why=f"the run is of corrente {__version__}, this is {hello.version}", wrong=True)
        if hello.model and hello.model != self._model:
            return Refused(why=f"another model: the run has that of {self._config.model.path}", wrong=True)
        self._count += 1
        return Welcome(name=f"joined-{self._count}", config=self._config)

    @asynccontextmanager
    async def _joining(self, line: Line, name: str) -> AsyncIterator[Replica]:
        """An engine that was welcomed, as a replica; what keeps it from becoming one is said to it as well."""
        section = self._config.runtime if isinstance(self._config.runtime, Procs) else Procs()
        deathbed, leaving = ExitWatcher(), anyio.Event()
        line.unasked = lambda _: leaving.set()
        with as_one():
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(deathbed.watch, lambda: _life(line))
                try:
                    with ready_within(section.start_deadline_s, name):
                        index = self._config.pool.replicas + self._count - 1
                        layout = await prepare(line, self._factory, self._config, self._weights, fd=None, index=index)
                except CorrenteError as error:
                    self._tell("warning", f"{line.label} could not join: {error}")
                    line.post(wire.Dismiss(why=str(error)))
                    with anyio.move_on_after(DISMISSAL_S):
                        await deathbed.ended()
                    raise
                yield Replica(
                    name=name, engine=ProcEngine(line), layout=layout, ended=deathbed.ended, leaving=leaving.wait
                )
                tasks.cancel_scope.cancel()
        line.mark_dead(line.death or f"{line.label} was let go")


async def _life(line: Line) -> NoReturn:
    """Carry calls until the engine hangs up, or says what cannot be understood."""
    try:
        await line.carry()
        how = "closed its connection"
    except* (ValueError, msgspec.MsgspecError) as errors:
        how = f"spoke nonsense ({errors.exceptions[0]})"
    line.mark_dead(f"{line.label} {how}")
    raise WorkerDied(line.death)


async def _first_words(connection: socket.socket) -> Hello | None:
    """What a connection has to say, None when that is no greeting."""
    frames, heard = wire.Frames(), 0
    while heard < greeting.MOST_BYTES:
        await anyio.wait_readable(connection)
        try:
            data = connection.recv(4096)
            heard += len(data)
            for body in frames.feed(data):
                return wire.decode(body, Hello)
        except BlockingIOError:
            continue
        except (OSError, ValueError, msgspec.MsgspecError):
            return None
        if not data:
            return None
    return None


async def _say(connection: socket.socket, answer: Welcome | Refused) -> None:
    left = memoryview(wire.frame(answer))
    while left:
        try:
            left = left[connection.send(left) :]
        except BlockingIOError:
            await anyio.wait_writable(connection)
        except OSError:
            return
