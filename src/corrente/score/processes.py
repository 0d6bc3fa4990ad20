"""Reward functions in processes of their own: for verifiers that hang in C code, use signals, fork, exit or crash.

A source has ``workers`` processes, each with the function imported. One that is late is killed, and replaced when it is needed
next; starting is not part of a call's deadline. A process imports its function by name: closures, lambdas, partials and objects
stay in the controller's process, and are refused here with the reason.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio

from corrente.common import serialization
from corrente.common.spawn import Spawner, Worker
from corrente.data.types import Group
from corrente.errors import ConfigError, RewardError, WorkerDied
from corrente.score import messages
from corrente.score.base import ScoreResult
from corrente.score.calling import (
    FunctionAnswer,
    FunctionLog,
    function_arguments,
    function_columns,
    parse_function_answer,
)
from corrente.score.functions import TrainerStateOf, score_results
from corrente.score.resolve import function_name, resolve_function
from corrente.score.worker import kill_worker, start_scoring_worker

RESPOND = "corrente.score.processes:respond"
START_S = 120.0
"""Time a process gets to import its function."""


class ProcessSource:
    """Implements Source. ``function``: a built-in name, "package.module:function" or "path/to/file.py:function". At most
    ``workers`` calls at once. ``spawner`` starts the processes, ``close`` ends them. ``logs``: a folder for their logs."""

    single = False

    def __init__(
        self,
        function: str | Callable[..., Any],
        *,
        state_of: TrainerStateOf,
        options: Mapping[str, Any] | None = None,
        name: str = "",
        workers: int = 1,
        spawner: Spawner,
        logs: Path | None = None,
    ) -> None:
        self._path = function if isinstance(function, str) else path_of(function)
        self.name = name or function_name(resolve_function(self._path))
        self._options = dict(options or {})
        self._state_of, self._spawner, self._logs = state_of, spawner, logs
        self._names = [f"scorer-{self.name}" if workers == 1 else f"scorer-{self.name}-{n}" for n in range(workers)]
        self._unused = list(reversed(self._names))
        """Names of workers that are not running."""
        self._idle: dict[str, Worker] = {}
        self._busy: dict[str, Worker] = {}

    async def open(self) -> None:
        """Start all processes. ConfigError when the function cannot be imported there."""
        async with anyio.create_task_group() as tasks:
            for _ in self._names:
                tasks.start_soon(self._start)

    async def close(self) -> None:
        """End all processes."""
        async with anyio.create_task_group() as tasks:
            for worker in (*self._idle.values(), *self._busy.values()):
                tasks.start_soon(kill_worker, worker)
        self._idle, self._busy = {}, {}

    async def wait_until_ready(self) -> None:
        """See Source. Starts a process where one was killed."""
        if not self._idle:
            await self._start()

    async def score_episodes(self, group: Group) -> Sequence[ScoreResult]:
        """See Source. Cancelled, the process is killed."""
        question = self._question(group)
        name, worker = self._idle.popitem()
        self._busy[name] = worker
        answered = False
        try:
            result: FunctionAnswer = await worker.call(question, FunctionAnswer)
            answered = True
        except WorkerDied as death:
            raise RewardError(f"{self.name}: {death}") from death
        except RewardError as error:
            answered = True
            raise RewardError(f"{self.name}: {error}") from error
        finally:
            self._busy.pop(name, None)
            if answered:
                self._idle[name] = worker
            else:
                self._unused.append(name)
                await kill_worker(worker)
        return score_results(result)

    async def _start(self) -> None:
        name = self._unused.pop()
        try:
            self._idle[name] = await start_scoring_worker(
                self._spawner,
                name=self.name,
                worker_name=name,
                respond=RESPOND,
                options={"path": self._path, "name": self.name, "options": self._options},
                within_s=START_S,
                logs=self._logs,
            )
        except BaseException:
            self._unused.append(name)
            raise

    def _question(self, group: Group) -> messages.CallFunction:
        given = function_columns(group)
        given.pop("environments", None)  # live objects: a function that asks for them is refused when it is made
        for column, values in given.items():
            try:
                serialization.encode(values)
            except TypeError as error:
                raise RewardError(f"{self.name}: the column {column!r} does not cross processes: {error}") from None
        return messages.CallFunction(columns=given, state=self._state_of(group), count=len(group.episodes))


def respond(*, path: str, name: str, options: Mapping[str, Any]) -> Callable[[messages.CallFunction], FunctionAnswer]:
    """The function at ``path``, as the worker answers with it (worker.Respond)."""
    function = functools.partial(resolve_function(path), **options)

    def answer(question: messages.CallFunction) -> FunctionAnswer:
        log = FunctionLog(question.count)
        try:
            result = function(**function_arguments(function, question.columns, question.state, log))
            if inspect.isawaitable(result):
                result = anyio.run(_awaited, result)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)  # an alarm that is still set would go off in the next call
        return parse_function_answer(name, result, log, count=question.count)

    return answer


async def _awaited(result: Any) -> Any:
    return await result


def path_of(function: Callable[..., Any]) -> str:
    """The name by which another process can import ``function``. ConfigError, with the reason, where there is none."""

    def refuse(why: str) -> ConfigError:
        return ConfigError(
            f"reward function {function_name(function)}: {why}, and a process imports its function by name; move it to a module "
            "or run it in a thread"
        )

    if isinstance(function, functools.partial):
        raise refuse("it is a partial")
    name = getattr(function, "__qualname__", "")
    if not name or inspect.ismethod(function):
        raise refuse("it is a method" if inspect.ismethod(function) else "it is an object")
    if "<lambda>" in name:
        raise refuse("it is a lambda")
    if "<locals>" in name:
        raise refuse("it is a closure, defined inside another function")
    if function.__module__ == "__main__":
        raise refuse("it is defined in the program that is running")
    found: Any = importlib.import_module(function.__module__)
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is not function:
        raise refuse(f"{function.__module__}.{name} is something else")
    return f"{function.__module__}:{name}"
