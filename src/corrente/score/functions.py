"""Scores groups with Python functions, several at once, each failing alone.

A function is called with keyword arguments that are lists over the group's episodes (``calling``); it is given those it has
parameters for. It returns one number or None per episode, None meaning "does not apply". Functions of a group run concurrently,
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
from corrente.score.calling import Called, Log, TrainerState, arguments, called, columns
from corrente.score.combined import CombinedScorer, ScorerTerms
from corrente.score.resolve import Function, distinct_names

Offload = Callable[[Callable[[], Any]], Awaitable[Any]]
StateOf = Callable[[Group], TrainerState]

CALLS_AT_ONCE = 64
"""Threads of one function, hence its calls at once, where nobody said how many."""


class Progress:
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
    """Implements Source. ``offload`` runs a synchronous function; if not given, ``at_once`` daemon threads do."""

    single = False

    def __init__(
        self,
        function: Function,
        *,
        name: str,
        state_of: StateOf,
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

    async def ready(self) -> None:
        """See Source."""

    async def mark(self, group: Group) -> Sequence[ScoreResult]:
        """See Source."""
        count, log = len(group.episodes), Log(len(group.episodes))
        given = arguments(self._function, columns(group), self._state_of(group), log)

        def read(answer: Any) -> Called:
            return called(self.name, answer, log, count=count)

        if _is_async(self._function):
            return marks(read(await self._function(**given)))

        def call() -> Any:
            answer = self._function(**given)
            return answer if inspect.isawaitable(answer) else read(answer)

        answer = await self._offload(call)
        return marks(answer if isinstance(answer, Called) else read(await answer))


class FunctionsScorer(CombinedScorer):
    """Functions under equal terms. ``weights`` empty: all 1. ``offload``: daemon threads if not given."""

    def __init__(
        self,
        functions: Sequence[Function],
        *,
        weights: Sequence[float] = (),
        deadline_s: float = 30.0,
        offload: Offload | None = None,
        state_of: StateOf | None = None,
    ) -> None:
        super().__init__(members(functions, weights=weights, deadline_s=deadline_s, offload=offload, state_of=state_of))


def members(
    functions: Sequence[Function],
    *,
    weights: Sequence[float] = (),
    deadline_s: float = 30.0,
    offload: Offload | None = None,
    state_of: StateOf | None = None,
) -> list[tuple[FunctionSource, ScorerTerms]]:
    """Members of a panel, one per function. ConfigError for a wrong number of weights, and for what cannot be called."""
    if weights and len(weights) != len(functions):
        raise ConfigError(
            f"reward.weights has {len(weights)} values for {len(functions)} reward.functions; give one each"
        )
    state_of = state_of or Progress()
    return [
        (
            FunctionSource(function, name=name, offload=offload, state_of=state_of),
            ScorerTerms(weight=weight, deadline_s=deadline_s, at_once=calls_at_once(function)),
        )
        for function, name, weight in zip(
            functions, distinct_names(functions), weights or (1.0,) * len(functions), strict=True
        )
    ]


def calls_at_once(function: Function) -> int:
    """How many calls of it are made at once: as many as it has threads; 0, any number, of one that is a coroutine."""
    return 0 if _is_async(function) else CALLS_AT_ONCE


def marks(call: Called) -> list[ScoreResult]:
    """A mark per episode. What was logged as a metric is kept once, with the first."""
    return [
        ScoreResult(
            score=reading.score,
            error=reading.error,
            extra={column: values[at] for column, values in call.extra.items()},
            metrics=_means(call.metrics) if at == 0 else {},
        )
        for at, reading in enumerate(call.readings)
    ]


def _means(values: Sequence[tuple[str, float]]) -> dict[str, float]:
    by_name: dict[str, list[float]] = {}
    for name, value in values:
        by_name.setdefault(name, []).append(value)
    return {name: sum(all_of) / len(all_of) for name, all_of in by_name.items()}


def _is_async(function: Function) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004
