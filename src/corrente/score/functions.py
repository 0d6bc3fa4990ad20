"""Scores groups with Python functions, several at once, each failing alone.

A function is called with keyword arguments that are lists over the group's episodes (``calling``), of those it has parameters
for. It returns one number or None per episode, None meaning "does not apply". Functions of a group run concurrently,
synchronous ones in threads, each function in its own: one that hangs takes no thread of another.

A function that raises, runs past the deadline or answers with the wrong number of values costs the group's episodes; one value
that is not a finite number costs that episode.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from corrente.common.threads import DaemonThreads
from corrente.data.types import Group
from corrente.errors import ConfigError
from corrente.score.base import ScoreResult
from corrente.score.calling import (
    FunctionAnswer,
    FunctionLog,
    TrainerState,
    function_arguments,
    function_columns,
    parse_function_answer,
)
from corrente.score.combined import CombinedScorer, ScorerTerms
from corrente.score.resolve import Function, distinct_names

Offload = Callable[[Callable[[], Any]], Awaitable[Any]]
TrainerStateOf = Callable[[Group], TrainerState]

CALLS_AT_ONCE = 64
"""Default number of threads of one function, hence of its concurrent calls."""


class RunProgress:
    """The TrainerState of a group, from the version it was admitted under and its prompt's id (".. <epoch>/<row>")."""

    def __init__(self, *, every: int = 1, max_steps: int = 0) -> None:
        self._every, self._max_steps = every, max_steps

    def __call__(self, group: Group) -> TrainerState:
        epoch = group.prompt.id.rpartition(":")[2].partition("/")[0]
        return TrainerState(
            global_step=max(0, group.admitted_version) * self._every,
            max_steps=self._max_steps,
            epoch=float(epoch) if epoch.isdecimal() else 0.0,
        )


class FunctionSource:
    """Implements Source with a Python function. ``offload`` runs a synchronous one; None: ``at_once`` daemon threads do."""

    single = False

    def __init__(
        self,
        function: Function,
        *,
        name: str,
        state_of: TrainerStateOf,
        offload: Offload | None = None,
        at_once: int = CALLS_AT_ONCE,
    ) -> None:
        if not callable(function):
            raise ConfigError(
                f"reward.functions: {function!r} is of type {type(function).__name__}; it must be callable"
            )
        self.name = name
        self._function, self._state_of = function, state_of
        self._offload = offload or DaemonThreads(limit=at_once or CALLS_AT_ONCE)

    async def wait_until_ready(self) -> None:
        """See Source."""

    async def score_episodes(self, group: Group) -> Sequence[ScoreResult]:
        """See Source."""
        count, log = len(group.episodes), FunctionLog(len(group.episodes))
        arguments = function_arguments(self._function, function_columns(group), self._state_of(group), log)

        def parse(answer: Any) -> FunctionAnswer:
            return parse_function_answer(self.name, answer, log, count=count)

        if _is_coroutine_function(self._function):
            return score_results(parse(await self._function(**arguments)))

        def call() -> Any:
            answer = self._function(**arguments)
            return answer if inspect.isawaitable(answer) else parse(answer)

        answer = await self._offload(call)
        return score_results(answer if isinstance(answer, FunctionAnswer) else parse(await answer))


class FunctionsScorer(CombinedScorer):
    """A Scorer of Python functions alone, for loops that are put together by hand. ``weights`` empty: all 1. ``offload``: runs
    synchronous functions; None: daemon threads do."""

    def __init__(
        self,
        functions: Sequence[Function],
        *,
        weights: Sequence[float] = (),
        deadline_s: float = 30.0,
        offload: Offload | None = None,
        state_of: TrainerStateOf | None = None,
    ) -> None:
        super().__init__(
            function_members(functions, weights=weights, deadline_s=deadline_s, offload=offload, state_of=state_of)
        )


def function_members(
    functions: Sequence[Function],
    *,
    weights: Sequence[float] = (),
    deadline_s: float = 30.0,
    offload: Offload | None = None,
    state_of: TrainerStateOf | None = None,
) -> list[tuple[FunctionSource, ScorerTerms]]:
    """Members of a CombinedScorer, one per function. ConfigError for a wrong number of weights, and for what cannot be called."""
    if weights and len(weights) != len(functions):
        raise ConfigError(
            f"reward.weights has {len(weights)} values for {len(functions)} reward.functions; give one each"
        )
    state_of = state_of or RunProgress()
    return [
        (
            FunctionSource(function, name=name, offload=offload, state_of=state_of),
            ScorerTerms(weight=weight, deadline_s=deadline_s, at_once=concurrent_calls(function)),
        )
        for function, name, weight in zip(
            functions, distinct_names(functions), weights or (1.0,) * len(functions), strict=True
        )
    ]


def concurrent_calls(function: Function) -> int:
    """Number of concurrent calls of a function: one per thread; 0, any number, for a coroutine function."""
    return 0 if _is_coroutine_function(function) else CALLS_AT_ONCE


def score_results(call: FunctionAnswer) -> list[ScoreResult]:
    """Convert an answer to a result per episode. Logged metrics are kept once, with the first."""
    return [
        ScoreResult(
            score=reading.score,
            error=reading.error,
            extra={column: values[at] for column, values in call.extra.items()},
            metrics=_mean_by_name(call.metrics) if at == 0 else {},
        )
        for at, reading in enumerate(call.readings)
    ]


def _mean_by_name(values: Sequence[tuple[str, float]]) -> dict[str, float]:
    by_name: dict[str, list[float]] = {}
    for name, value in values:
        by_name.setdefault(name, []).append(value)
    return {name: sum(all_of) / len(all_of) for name, all_of in by_name.items()}


def _is_coroutine_function(function: Function) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004
