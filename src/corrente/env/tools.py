"""Functions the policy may call: described by JSON schemas, called concurrently, and always answered.

A schema is made of a function's type hints and docstring (transformers' ``get_json_schema``). A call that cannot be read, an
unknown tool, an exception and a missed deadline are answers too: the policy reads what went wrong, and the episode goes on.
Coroutine functions run on the event loop; others in daemon threads, which a deadline gives up but cannot end: they keep their
place under the limit until they return, and do not keep the process from ending.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import anyio

from corrente.common.plain_data import plain_text
from corrente.common.threads import guard_user_code
from corrente.env.calls import ToolCall
from corrente.errors import ConfigError, RolloutError, error_text, root_cause

Offload = Callable[[Callable[[], Any]], Awaitable[Any]]
Function = Callable[..., Any]


class Toolbox:
    """Tools by their names. ``offload`` runs a synchronous function. ConfigError for two of one name."""

    def __init__(self, functions: Sequence[Function], *, offload: Offload, deadline_s: float) -> None:
        self._functions: dict[str, Function] = {}
        for function in functions:
            name = getattr(function, "__name__", "")
            if name in self._functions:
                raise ConfigError(f"env.functions: two tools are called {name!r}; the policy could not tell them apart")
            self._functions[name] = function
        self._offload, self._deadline_s = offload, deadline_s

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._functions)

    @property
    def functions(self) -> tuple[Function, ...]:
        return tuple(self._functions.values())

    async def call_all(
        self, calls: Sequence[ToolCall], *, others: Sequence[str] = ()
    ) -> tuple[list[dict[str, Any]], Counter[str]]:
        """Call all tools concurrently. Returns a message per call, in their order, and counts: calls, failures, failures by kind.
        ``others``: names of tools that another toolbox has."""
        answers: list[dict[str, Any]] = [{} for _ in calls]
        counts: Counter[str] = Counter(calls=len(calls))

        async def answer_one(at: int, call: ToolCall) -> None:
            content, fault = await self._answer(call, others)
            answers[at] = {"role": "tool", "name": call.name or "unknown", "content": content}
            if fault:
                counts["failures"] += 1
                counts[fault] += 1

        async with anyio.create_task_group() as tasks:
            for at, call in enumerate(calls):
                tasks.start_soon(answer_one, at, call)
        return answers, counts

    async def _answer(self, call: ToolCall, others: Sequence[str]) -> tuple[str, str]:
        """The answer to one call, and the kind of failure it reports; empty for none."""
        if call.error:
            return _error_text(f"the call cannot be read: {call.error}"), "malformed"
        function = self._functions.get(call.name)
        if function is None:
            known = ", ".join((*self._functions, *others)) or "none"
            return _error_text(f"there is no tool {call.name!r}; there is: {known}"), "unknown"
        try:
            with anyio.move_on_after(self._deadline_s):
                return result_text(await call_function(function, call.arguments, offload=self._offload)), ""
        except Exception as error:  # a tool is anybody's code, and its failure is what the policy has to deal with
            cause = root_cause(error)
            return _error_text(error_text(cause)), "raised"
        return _error_text(f"no answer within {self._deadline_s:g} s"), "late"


async def call_function(function: Function, arguments: dict[str, Any], *, offload: Offload) -> Any:
    """Call a plain function through ``offload``, or await a coroutine. RolloutError where it exits or is cancelled."""
    with guard_user_code():
        if is_coroutine_function(function):
            return await function(**arguments)
        answer = await offload(lambda: function(**arguments))
        return await answer if inspect.isawaitable(answer) else answer


def is_coroutine_function(function: Function) -> bool:
    """True if calling ``function`` makes a coroutine."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def tool_schema(function: Function) -> dict[str, Any]:
    """The JSON schema of a tool. ConfigError where its hints or its docstring do not say enough."""
    from transformers.utils.chat_template_utils import get_json_schema  # heavy: only a run with tools pays for it

    try:
        return dict(get_json_schema(function))
    except Exception as error:  # transformers raises a type of its own for each thing that is missing
        name = getattr(function, "__name__", repr(function))
        reason = (str(error).splitlines() or [""])[0]
        raise ConfigError(
            f"env.functions: the tool {name!r} cannot be described to the policy: {reason} (it needs type hints, and a docstring "
            'with an "Args:" section that describes each argument)'
        ) from error


def result_text(value: Any) -> str:
    """Convert a tool's result to the text that the policy reads."""
    return plain_text(value if isinstance(value, str) else str(value))


def _error_text(message: str) -> str:
    return plain_text(str({"error": message}))


async def with_deadline(deadline_s: float, call: Awaitable[Any], message: str) -> Any:
    """Await ``call`` and return its result. RolloutError, with ``message``, where it takes longer than ``deadline_s``."""
    with anyio.move_on_after(deadline_s):
        return await call
    raise RolloutError(message)
