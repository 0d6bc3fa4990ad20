"""Scoring workers: the role that they serve, and how one is started.

A scoring worker runs code of users, or a model. It answers one question after the other in its only thread, so the code may use
signals (SIGALRM), fork, or hang in C: whoever asks stops the worker when it is late, and what it forked is killed with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import anyio

from corrente.common import rpc
from corrente.common.imports import load_object
from corrente.common.rpc_server import Send
from corrente.common.spawn import Spawner, Worker, WorkerPlace, WorkerRole
from corrente.errors import ConfigError, CorrenteError, RewardError, WorkerDied, described
from corrente.score import messages

SCORING_ROLE = "corrente.score.worker:ScoringRole"
VARIABLES = {"TOKENIZERS_PARALLELISM": "false", "OMP_WAIT_POLICY": "passive"}

Respond = Callable[[Any], Any]
"""Answers a question; what it returns is encoded, what it raises costs the question."""


class ScoringRole:
    """Serves ``respond``: the dotted path of a function that is called with ``options`` and returns a ``Respond``."""

    requests: Any = messages.Question
    busy = False

    def __init__(self, send: Send, *, respond: str, options: Mapping[str, Any]) -> None:
        self._respond: Respond = load_object(respond)(**options)

    def handle(self, call: rpc.RpcCall[messages.Question]) -> rpc.RpcAnswer | None:
        """See Role. RewardError for whatever the user's code raises."""
        if isinstance(call.body, rpc.CancelCall):
            return None  # read too late to matter: it is answered by now, or the worker is being killed
        try:
            answer = self._respond(call.body)
        except Exception as error:
            raise RewardError(described(error)) from error
        try:
            return rpc.reply(call.id, answer)
        except (TypeError, ValueError, OverflowError) as error:
            raise RewardError(f"its answer does not cross processes: {error}") from error

    def work(self) -> list[rpc.RpcAnswer]:
        return []

    def close(self) -> None:
        """See Role. Nothing outlives the process."""


async def start_scoring_worker(
    spawner: Spawner,
    *,
    name: str,
    worker_name: str,
    respond: str,
    options: Mapping[str, Any],
    within_s: float,
    nice: int = 0,
    threads: int = 0,
    logs: Path | None = None,
) -> Worker:
    """A worker that can be asked. ``name`` is the scorer's, in errors; ``logs`` the folder for the worker's log.

    ConfigError when it says that it cannot score; RewardError when it ends, or takes longer than ``within_s``.
    """
    role = WorkerRole(
        name=worker_name,
        path=SCORING_ROLE,
        arguments={"respond": respond, "options": dict(options)},
        isolated=True,
    )
    place = WorkerPlace(nice=nice, threads=threads, variables=VARIABLES)
    log = None if logs is None else logs / f"{worker_name}.log"
    worker: Worker | None = None
    try:
        with anyio.move_on_after(within_s):
            worker = await spawner.spawn(role, place=place, log=log)
    except WorkerDied as death:
        raise RewardError(f"{name}: {death}") from death
    except CorrenteError as error:
        raise ConfigError(f"reward scorer {name}: {error}") from error
    if worker is None:
        raise RewardError(f"{name}: its process was not ready within {within_s:g} s")
    return worker


async def kill_worker(worker: Worker) -> None:
    """Kill a worker that is late, or not needed any more; not to be cancelled."""
    with anyio.CancelScope(shield=True):
        await worker.stop(0)
