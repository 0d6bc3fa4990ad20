"""Starts vLLM servers, or attaches to some, as replicas.

A launched server listens on a Unix socket in a folder of its own, readable by this user only, and asks for a token: it has no
port that another run, or another user, could meet. Its processes run under a supervisor (supervisor.py), a worker that ends all
of them and removes the folder when the controller stops it or is gone.
"""

from __future__ import annotations

import math
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread
import httpx2 as httpx

from corrente.common.events import LogEvent, ignore_event
from corrente.common.spawn import Spawner, Worker, WorkerRole
from corrente.common.worker_log import LINES, describe_output
from corrente.config import Lora, RunConfig, Vllm
from corrente.engine.embedded.stop_conditions import Decode, load_decoder
from corrente.engine.launcher import Replica, SharedWeights
from corrente.engine.vllm import environment
from corrente.engine.vllm.adapters import AdapterEngine
from corrente.engine.vllm.client import Client, ServerError, open_client
from corrente.engine.vllm.engine import VllmEngine
from corrente.engine.vllm.nccl_engine import VllmNcclEngine
from corrente.engine.vllm.supervisor import AwaitEnd
from corrente.errors import ConfigError, GenerationError, PipelineError, WorkerDied
from corrente.sync.kinds import transport_of

PACKAGE = Path(__file__).parents[2]
"""The folder of corrente, which a server's plugin imports from."""
SUPERVISOR_ROLE = "corrente.engine.vllm.supervisor:SupervisorRole"
Ended = Callable[[], Awaitable[WorkerDied]]

POLL_S = 0.25
"""Between two attempts to reach a server that is starting."""
QUIET_S = 3.0
"""Time an attached server may take to answer before the user is told that the run waits for it."""
GRACE_PART = 0.6
"""Part of limits.stop_s that a server gets to end by itself; in the rest its supervisor clears up."""
OUTPUT_S = 0.05
"""Time the last output of a server gets to arrive, after the report of its end."""
LOST_AFTER = 5
"""Seconds in a row in which an attached server cannot be reached before it counts as dead."""
_ERROR = re.compile(r"\b[A-Za-z_]*(Error|Exception|Killed)\b")
_PREFIX = re.compile(r"^\(\w+ pid=\d+\) ")


class VllmLauncher:
    """Implements Launcher for engine.kind = "vllm"."""

    def __init__(
        self,
        config: RunConfig,
        *,
        weights: SharedWeights,
        spawner: Spawner,
        logs: Path | None = None,
        log_event: LogEvent = ignore_event,
    ) -> None:
        assert isinstance(config.engine, Vllm)
        self._config, self._section, self._weights = config, config.engine, weights
        self._spawner, self._logs = spawner, logs
        self._log_event = log_event
        self.replicas = len(self._section.urls) or config.pool.replicas
        self._decode: Decode | None = None

    def launch(self, index: int) -> AbstractAsyncContextManager[Replica]:
        """See Launcher."""
        return self._attach(index) if self._section.urls else self._launch(index)

    @asynccontextmanager
    async def _attach(self, index: int) -> AsyncGenerator[Replica]:
        name = f"vllm at {self._section.urls[index]}"
        token = self._section.token or os.environ.get(environment.TOKEN_VARIABLE, "")
        async with open_client(self._client(self._section.urls[index], token)) as client:
            deadline_s = self._section.start_deadline_s
            why = await _answers(client, quiet_s := min(QUIET_S, deadline_s))
            if why is not None and quiet_s < deadline_s:
                self._log_event(
                    "info", f"waiting for {client.url} ({why}); engine.start_deadline_s allows {deadline_s:g} s"
                )
                why = await _answers(client, deadline_s - quiet_s)
            if why is not None:
                within = f"within engine.start_deadline_s = {deadline_s:g} s"
                raise ConfigError(f"engine.urls: {client.url} did not answer {within}: {why}")
            with tempfile.TemporaryDirectory(prefix="corrente-adapters-") as root:
                yield await self._replica(name, client, lambda: await_loss(client, name), Path(root))

    @asynccontextmanager
    async def _launch(self, index: int) -> AsyncGenerator[Replica]:
        name = f"vllm-{index}"
        with tempfile.TemporaryDirectory(prefix="corrente-vllm-", ignore_cleanup_errors=True) as folder:
            async with self._server(name).running(Path(folder)) as server:
                transport = httpx.AsyncHTTPTransport(uds=str(server.socket), limits=httpx.Limits(max_connections=None))
                client = self._client("http://vllm", server.token, server=server, transport=transport)
                async with open_client(client):
                    await server.ready(client, self._section.start_deadline_s)
                    yield await self._replica(name, client, server.ended, server.socket.parent)

    def _server(self, name: str) -> Server:
        return Server(self._config, name=name, spawner=self._spawner, logs=self._logs)

    def _client(
        self, url: str, token: str, *, server: Server | None = None, transport: httpx.AsyncBaseTransport | None = None
    ) -> Client:
        return Client(
            url,
            token=token,
            verify=self._section.verify,
            retries=self._section.retries,
            deadline_s=self._section.request_deadline_s,
            transport=transport,
            death=(lambda: None) if server is None else server.death,
        )

    async def _replica(self, name: str, client: Client, ended: Ended, root: Path) -> Replica:
        if self._decode is None:
            model = self._config.model
            load = partial(load_decoder, Path(model.path), trust_remote_code=model.trust_remote_code)
            self._decode = await anyio.to_thread.run_sync(load)
        engine = self._engine(client, root)
        try:
            layout = await engine.open()
        except (ServerError, GenerationError) as error:
            raise ConfigError(
                f"engine.urls: {client.url} does not answer as an engine does ({error}); docs/how-to/vllm.md says how to start it"
            ) from error
        self._weights.fit(layout)
        return Replica(name=name, engine=engine, layout=layout, ended=ended)

    def _engine(self, client: Client, root: Path) -> VllmEngine:
        """``root``: where adapters are put for the server to read."""
        adapters, prefix_cache = self._config.adapters, self._section.prefix_cache
        vocabulary = environment.vocabulary(self._config)
        if not transport_of(self._config.sync).receiver:
            return VllmNcclEngine(
                client,
                decode=self._decode,
                prefix_cache=prefix_cache,
                vocabulary=vocabulary,
                source=Path(self._config.model.path),
                dtype="float32" if self._config.model.dtype == "float32" else "bfloat16",
            )
        if not isinstance(adapters, Lora):
            return VllmEngine(client, decode=self._decode, prefix_cache=prefix_cache, vocabulary=vocabulary)
        return AdapterEngine(
            client,
            decode=self._decode,
            prefix_cache=prefix_cache,
            vocabulary=vocabulary,
            settings=adapters,
            source=Path(self._config.model.path),
            root=root,
            trust_remote_code=self._config.model.trust_remote_code,
        )


class Server:
    """A launched server, from before it runs until it is gone. Its worker supervises it (supervisor.py)."""

    def __init__(self, config: RunConfig, *, name: str, spawner: Spawner, logs: Path | None) -> None:
        self._config, self.name, self._spawner, self._logs = config, name, spawner, logs
        self.token = secrets.token_urlsafe(24)
        self.socket = Path()
        self._worker: Worker | None = None
        self._ended = anyio.Event()
        self._death: WorkerDied | None = None

    @asynccontextmanager
    async def running(self, folder: Path) -> AsyncGenerator[Server]:
        """Entering starts it, without waiting for it; leaving ends it within limits.stop_s, dead or stuck as it may be.
        ``folder`` is its own, and is removed by its supervisor, which outlives a controller that is killed."""
        section = self._config.engine
        assert isinstance(section, Vllm)
        where = environment.find(section.python)
        self.socket = folder / "http"
        packages = folder / "packages"
        packages.mkdir()
        try:
            (packages / "corrente").symlink_to(PACKAGE, target_is_directory=True)
        except OSError:  # a file system without symbolic links
            shutil.copytree(PACKAGE, packages / "corrente", ignore=shutil.ignore_patterns("__pycache__"))
        role = WorkerRole(
            name=self.name,
            path=SUPERVISOR_ROLE,
            arguments={
                "command": environment.arguments(self._config, where, socket=self.socket),
                "folder": str(folder),
                "packages": str(packages),
                "token": self.token,
                "grace_s": GRACE_PART * self._config.limits.stop_s,
            },
            cleans_up=True,
        )
        worker = await self._spawner.spawn(role, log=self._log)
        self._worker = worker
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._watch, worker)
                yield self
                tasks.cancel_scope.cancel()
        finally:
            with anyio.CancelScope(shield=True):
                await worker.stop(self._config.limits.stop_s)

    async def ready(self, client: Client, within_s: float) -> None:
        """Return once it answers. WorkerDied when it ended before that."""
        if await _answers(client, within_s, death=self.death) is not None:
            raise PipelineError(
                f"{self.name} was not ready after {within_s:g} s; engine.start_deadline_s allows more; {self._last_output()}"
            )

    async def ended(self) -> WorkerDied:
        """See Replica.ended."""
        await self._ended.wait()
        assert self._death is not None
        return self._death

    def death(self) -> WorkerDied | None:
        """The death of the server, if it has ended."""
        return self._death

    async def _watch(self, worker: Worker) -> None:
        """The supervisor reports the end of the server at once, and clears up only then."""
        try:
            how = await worker.call(AwaitEnd(), str)
        except WorkerDied:
            how = "lost its supervisor"
        await anyio.sleep(OUTPUT_S)
        self._death = WorkerDied(f"{worker.label} {how}; {self._last_output()}")
        self._ended.set()

    @property
    def _log(self) -> Path | None:
        return None if self._logs is None else self._logs / f"{self.name}.log"

    def _last_output(self) -> str:
        """The last errors it wrote, else its last lines, and where the rest is."""
        assert self._worker is not None
        lines = [_PREFIX.sub("", line).strip() for line in self._worker.output.splitlines() if line.strip()]
        telling = [line for line in lines if _ERROR.search(line)] or lines
        return describe_output(list(dict.fromkeys(telling[-LINES:])), self._log)


async def _answers(
    client: Client, within_s: float, *, death: Callable[[], WorkerDied | None] = lambda: None
) -> ServerError | None:
    """Wait until a server that may still be starting answers, if only to refuse; returns what kept it from that. Raises its
    death."""
    failure = ServerError("no answer")
    with anyio.move_on_after(within_s):
        while True:
            if (dead := death()) is not None:
                raise dead
            try:
                await client.get("/health")
                return None
            except GenerationError:
                return None
            except ServerError as error:
                failure = error
            await anyio.sleep(POLL_S)
    return failure


async def await_loss(client: Client, name: str) -> WorkerDied:
    """Returns when an attached server has not been reached for a while."""
    missed, why = 0, ServerError("")
    while missed < LOST_AFTER:
        await anyio.sleep(1.0)
        try:
            with anyio.fail_after(1.0):
                await client.get("/health")
            missed = 0
        except GenerationError:
            missed = 0  # a refusal is an answer
        except (ServerError, TimeoutError) as error:
            missed, why = missed + 1, error if isinstance(error, ServerError) else ServerError("no answer")
    return WorkerDied(f"{name} could not be reached for {math.ceil(missed)} s: {why}")
