"""A spawner starts workers, a role is what a worker does: what runs in a process is apart from who starts it.

Spawner       starts a worker for a role, at a place
Worker        a started process: it answers calls (rpc.py), ends, is stopped
WorkerRole    what runs there: a dotted path and plain data
WorkerPlace   where: host, cores, GPUs, priority, environment variables

``local_spawner.LocalSpawner`` starts child processes on this host. One that starts them elsewhere (actors of Ray, SSH, a
scheduler) implements the same Protocol, serves roles there, and keeps the contract of ``corrente.testing.check_spawner``.
Nothing in the Protocol assumes a shared file system or inherited descriptors; workers that share memory with their caller need
a spawner that is ``LocalOnly`` as well.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

import msgspec

from corrente.common.rpc_client import OnProgress, ignore_progress
from corrente.errors import WorkerDied

T = TypeVar("T")

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class WorkerRole(msgspec.Struct, frozen=True, kw_only=True):
    """The task of a worker. ``name``: the worker's, in messages. ``path`` ("module:attribute") names what builds a Role
    (rpc_server.py) from ``arguments``, which are plain data.

    ``isolated``: it runs code that may fork, use signals or hang in C. Such a worker has one thread, leads a session of its own,
    and everything it started is killed with it.
    ``cleans_up``: it is not killed together with its caller, but told by the end of the connection; it ends by itself once it has
    cleared up what it started.
    """

    name: str
    path: str
    arguments: dict[str, Any] = {}
    isolated: bool = False
    cleans_up: bool = False


class WorkerPlace(msgspec.Struct, frozen=True, kw_only=True):
    """The place a worker runs at. Every default leaves things as the starting process has them.

    ``host``: a name that the spawner knows; empty: its own. ``cpus``: cores it may use. ``threads``: size of its thread pools.
    ``gpus``: the GPUs it sees, as CUDA_VISIBLE_DEVICES names them; None: all. ``nice``: how far it steps back for others.
    ``variables``: environment variables.
    """

    host: str = ""
    cpus: tuple[int, ...] = ()
    threads: int = 0
    gpus: tuple[str, ...] | None = None
    nice: int = 0
    variables: dict[str, str] = {}

    def environment(self) -> dict[str, str]:
        """The environment variables that this place asks for."""
        threads = {name: str(self.threads) for name in THREAD_VARIABLES} if self.threads else {}
        gpus = {} if self.gpus is None else {"CUDA_VISIBLE_DEVICES": ",".join(self.gpus)}
        return {**threads, **gpus, **self.variables}


ANYWHERE = WorkerPlace()


class RpcCaller(Protocol):
    """Whoever calls can be passed on to a worker through: a Worker, or an RpcClient."""

    async def call(
        self, body: msgspec.Struct, kind: type[T] | Any, *, on_progress: OnProgress = ignore_progress
    ) -> T: ...


class Worker(RpcCaller, Protocol):
    """Contract.

    - ``call`` sends a message to the role and returns its answer, of type ``kind``; many may be open at once. It raises what the
      role raised: errors of corrente as themselves, others as PipelineError that names worker and class. WorkerDied when the
      worker ends first, or has ended. Cancelling a call tells the role (rpc.CancelCall).
    - ``ended`` returns when the worker has ended, however that was, with its name, how it ended and the last it wrote. Several
      tasks may wait for it. A process that is killed is noticed within a second.
    - ``stop`` asks it to end, kills it after ``within_s`` and returns when it is gone. May be called at any time, and again.
    - ``label`` names it, and its process, in messages. ``output``: the last few thousand bytes it wrote to stderr, as text, for
      whoever can read more out of it than the last lines; empty where the spawner does not see them.
    """

    @property
    def label(self) -> str: ...

    @property
    def output(self) -> str: ...

    async def ended(self) -> WorkerDied: ...

    async def stop(self, within_s: float) -> None: ...


class Spawner(Protocol):
    """Contract.

    - ``spawn`` starts a worker and returns when its role is built. What building it raises is raised here, as by Worker.call;
      WorkerDied when it ended before that. Then, and when it is cancelled, nothing of the worker is left.
    - ``log``: a file of the caller's host for what the worker writes to stdout and stderr, bounded in size; errors name it.
    - Workers end with whoever started them, however that ends: no worker outlives its caller by more than it takes to clear up.
    """

    async def spawn(self, role: WorkerRole, *, place: WorkerPlace = ANYWHERE, log: Path | None = None) -> Worker: ...


@runtime_checkable
class LocalOnly(Protocol):
    """A capability that only spawners of this host have: their workers can inherit open descriptors, under the same numbers."""

    def inheriting(self, *descriptors: int) -> Spawner: ...
