"""Functions in processes of their own: for verifiers that hang in C code, use signals, fork, exit or crash.

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
import msgspec

from corrente.data.types import Group
from corrente.errors import ConfigError, RewardError
from corrente.score import messages
from corrente.score.base import ScoreResult
from corrente.score.calling import FunctionLog, function_arguments, function_columns, parse_function_answer
from corrente.score.child import Child
from corrente.score.functions import TrainerStateOf, score_results
from corrente.score.resolve import function_name, resolve_function

ROLE = "corrente.score.processes:respond"
START_S = 120.0
"""Time a process gets to import its function."""


class ProcessSource:
    """Implements Source. ``function``: a built-in name, "package.module:function" or "path/to/file.py:function". At most
    ``workers`` calls at once. ``close`` ends the processes."""

    single = False

    def __init__(
        self,
        function: str | Callable[..., Any],
        *,
        state_of: TrainerStateOf,
        options: Mapping[str, Any] | None = None,
        name: str = "",
        workers: int = 1,
        log: Path | None = None,
    ) -> None:
        self._path = function if isinstance(function, str) else path_of(function)
        self.name = name or function_name(resolve_function(self._path))
        self._options = dict(options or {})
        self._state_of, self._workers, self._log = state_of, workers, log
        self._idle: list[Child] = []
        self._busy: set[Child] = set()

    async def open(self) -> None:
        """Start all processes. ConfigError when the function cannot be imported there."""
        async with anyio.create_task_group() as tasks:
            for _ in range(self._workers):
                tasks.start_soon(self._start)

    def close(self) -> None:
        """End all processes."""
        for child in (*self._idle, *self._busy):
            child.kill()
        self._idle, self._busy = [], set()

    async def wait_until_ready(self) -> None:
        """See Source. Starts a process where one was killed."""
        if not self._idle:
            await self._start()

    async def score_episodes(self, group: Group) -> Sequence[ScoreResult]:
        """See Source. Cancelled, the process is killed."""
        question = self._question(group)
        child = self._idle.pop()
        self._busy.add(child)
        asked = False
        try:
            answer = await child.ask(question)
            asked = True
        finally:
            self._busy.discard(child)
            if asked:
                self._idle.append(child)
            else:
                child.kill()
        if isinstance(answer, messages.Answered):
            return score_results(answer.call)
        assert isinstance(answer, messages.Raised)
        raise RewardError(f"{self.name}: {answer.error}")

    async def _start(self) -> None:
        child = Child.spawn(ROLE, {"path": self._path, "name": self.name, "options": self._options}, log=self._log)
        await child.ready(START_S, name=self.name)
        self._idle.append(child)

    def _question(self, group: Group) -> messages.Ask:
        given = function_columns(group)
        given.pop("environments", None)  # live objects: a function that asks for them is refused when it is made
        for column, values in given.items():
            try:
                msgspec.msgpack.encode(values)
            except TypeError as error:
                raise RewardError(f"{self.name}: the column {column!r} does not cross processes: {error}") from None
        return messages.Ask(columns=given, state=self._state_of(group), count=len(group.episodes))


def respond(*, path: str, name: str, options: Mapping[str, Any]) -> Callable[[messages.Question], messages.Answer]:
    """In the process: the role of a function."""
    function = functools.partial(resolve_function(path), **options)

    def answer(question: messages.Question) -> messages.Answer:
        assert isinstance(question, messages.Ask)
        log = FunctionLog(question.count)
        try:
            result = function(**function_arguments(function, question.columns, question.state, log))
            if inspect.isawaitable(result):
                result = anyio.run(_awaited, result)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)  # an alarm that is still set would go off in the next call
        return messages.Answered(call=parse_function_answer(name, result, log, count=question.count))

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
