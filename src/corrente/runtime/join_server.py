"""The controller's side of engines that come by themselves (``corrente engine --join RUN_FOLDER``).

An engine that knows the run's token, runs the same corrente and wants the same weights becomes one more replica of the pool. It
is caught up before it gets requests, gives back the requests it has when it leaves, and is not replaced. No fault of an engine
that joins ends the run. This host only: weights that lie in shared memory are opened through /proc.
"""

from __future__ import annotations

import hmac
import secrets
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import msgspec
from anyio.abc import TaskStatus

from corrente.common import rpc
from corrente.common.events import LogEvent
from corrente.common.rpc_client import RpcClient
from corrente.common.serialization import decode
from corrente.config import Procs, RunConfig
from corrente.engine.launcher import Replica, SharedWeights
from corrente.errors import CorrenteError, PipelineError, raising_root_cause
from corrente.runtime import handshake, wire
from corrente.runtime.embedded_launcher import prepare_engine, ready_within
from corrente.runtime.handles import ProcEngine
from corrente.runtime.handshake import Hello, Refused, Welcome
from corrente.version import __version__

HELLO_S = 10.0
"""Time a connection gets to send its Hello."""
DISMISSAL_S = 2.0
"""Time a dismissed engine gets to end before the connection is closed."""
ACCEPT_PAUSE_S = 0.1
"""Between two attempts to accept a connection, after one failed (no descriptors left, say)."""
MAX_UNKNOWN = 8
"""Connections that may be open at once without having sent a valid Hello."""


class JoinServer:
    """Lets engines join while ``run`` runs. ``factory``: dotted path of the function they build their core with; ``pool``: the
    EnginePool that takes them."""

    def __init__(
        self, folder: Path, config: RunConfig, *, factory: str, weights: SharedWeights, pool: Any, log_event: LogEvent
    ) -> None:
        self._folder, self._config, self._factory = folder, config, factory
        self._weights, self._pool, self._log_event = weights, pool, log_event
        self._token = secrets.token_hex(32)
        self._model = handshake.fingerprint(Path(config.model.path))
        self._unknown = anyio.CapacityLimiter(MAX_UNKNOWN)
        self._count = 0

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Listen in the run folder; the socket and the token are gone when this ends."""
        self._folder.mkdir(parents=True, exist_ok=True)
        try:
            server = handshake.listen(self._folder, self._token)
        except OSError as error:
            raise PipelineError(f"pool.join: no socket can be made in {self._folder}: {error.strerror}") from error
        try:
            with server:
                async with anyio.create_task_group() as connections:
                    task_status.started()
                    while True:
                        await anyio.wait_readable(server)
                        try:
                            connection, _ = server.accept()
                        except OSError:
                            await anyio.sleep(ACCEPT_PAUSE_S)
                            continue
                        connection.setblocking(False)
                        connections.start_soon(self._receive, connection)
        finally:
            handshake.remove_files(self._folder)

    async def _receive(self, connection: socket.socket) -> None:
        """Serve one connection, from its Hello to its end."""
        client: RpcClient | None = None
        name, leaving = "", anyio.Event()
        with connection:
            async with self._unknown:
                with anyio.move_on_after(HELLO_S):
                    hello = await _read_hello(connection)
                    answer = self._judge(hello)
                    await _send(connection, answer)
                    if hello is not None and isinstance(answer, Welcome):
                        name, label = answer.name, f"{answer.name} (pid {hello.pid})"
                        client = RpcClient(connection, label=label, on_unasked=lambda _: leaving.set())
            if client is not None:
                await self._pool.serve_joined(self._joining(client, name, leaving))

    def _judge(self, hello: Hello | None) -> Welcome | Refused:
        if hello is None or not hmac.compare_digest(hello.token.encode(), self._token.encode()):
            return Refused(why=f"the token is not this run's; read {self._folder / handshake.TOKEN} again")
        if hello.version != __version__:
            return Refused(why=f"the run is of corrente {__version__}, this is {hello.version}", wrong=True)
        if hello.model and hello.model != self._model:
            return Refused(why=f"another model: the run has that of {self._config.model.path}", wrong=True)
        self._count += 1
        return Welcome(name=f"joined-{self._count}", config=self._config)

    @asynccontextmanager
    async def _joining(self, client: RpcClient, name: str, leaving: anyio.Event) -> AsyncIterator[Replica]:
        """A welcomed engine as a replica. An error that keeps it from becoming one is sent to it as well."""
        section = self._config.runtime if isinstance(self._config.runtime, Procs) else Procs()
        with raising_root_cause():
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_run_client, client)
                try:
                    with ready_within(section.start_deadline_s, name):
                        index = self._config.pool.replicas + self._count - 1
                        layout = await prepare_engine(
                            client, self._factory, self._config, self._weights, fd=None, index=index
                        )
                except CorrenteError as error:
                    self._log_event("warning", f"{client.label} could not join: {error}")
                    client.post(wire.Dismiss(why=str(error)))
                    with anyio.move_on_after(DISMISSAL_S):
                        await client.ended()
                    raise
                yield Replica(
                    name=name, engine=ProcEngine(client), layout=layout, ended=client.ended, leaving=leaving.wait
                )
                tasks.cancel_scope.cancel()
        client.mark_dead(f"{client.label} was let go")


async def _run_client(client: RpcClient) -> None:
    """Carry calls until the engine hangs up, or sends what cannot be understood."""
    try:
        await client.run()
        how = "closed its connection"
    except* (ValueError, msgspec.MsgspecError) as errors:
        how = f"sent what is no answer ({errors.exceptions[0]})"
    client.mark_dead(f"{client.label} {how}")


async def _read_hello(connection: socket.socket) -> Hello | None:
    """The Hello of a connection; None when it sends something else."""
    frames, received = rpc.FrameReader(), 0
    while received < handshake.MAX_HELLO_BYTES:
        await anyio.wait_readable(connection)
        try:
            data = connection.recv(4096)
            received += len(data)
            for body in frames.feed(data):
                return decode(body, Hello)
        except BlockingIOError:
            continue
        except (OSError, ValueError, msgspec.MsgspecError):
            return None
        if not data:
            return None
    return None


async def _send(connection: socket.socket, answer: Welcome | Refused) -> None:
    left = memoryview(rpc.frame(answer))
    while left:
        try:
            left = left[connection.send(left) :]
        except BlockingIOError:
            await anyio.wait_writable(connection)
        except OSError:
            return
