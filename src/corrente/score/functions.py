"""Scores groups with Python functions, several at once, each failing alone.

A function is called with keyword arguments that are lists over the group's episodes: ``prompts`` (text), ``completions`` (text),
``completion_ids`` (token ids) and one per dataset column; it is given those it has parameters for. It returns one number or None
per episode, None meaning "does not apply". Functions of a group run concurrently, synchronous ones in threads.

    reward = sum over the functions that apply of weight * score,         None where none applies

A function that raises, runs past the deadline or answers with the wrong number of values costs the group's episodes; one value
that is not a finite number costs that episode. Nothing here stops the run: the pipeline's failure budget does.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import anyio
import msgspec

from corrente.config import Reward
from corrente.errors import ConfigError
from corrente.score.offload import DaemonThreads
from corrente.score.resolve import Function, accepted, distinct_names, resolve
from corrente.types import Episode, Group

Offload = Callable[[Callable[[], Any]], Awaitable[Any]]

CALLS_AT_ONCE = 64


class Failure(msgspec.Struct, frozen=True):
    """Why a function has no score for an episode."""

    status: str
    error: str


Score = float | None | Failure


class FunctionScorer:
    """Implements Scorer. ``weights`` empty: all 1. ``offload`` runs a synchronous function; daemon threads if not given."""

    def __init__(
        self,
        functions: Sequence[Function],
        *,
        weights: Sequence[float] = (),
        deadline_s: float = 30.0,
        offload: Offload | None = None,
    ) -> None:
        if weights and len(weights) != len(functions):
            raise ConfigError(
                f"reward.weights has {len(weights)} values for {len(functions)} reward.functions; give one each"
            )
        for function in functions:
            if not callable(function):
                raise ConfigError(
                    f"reward.functions: {function!r} is of type {type(function).__name__}; it must be callable"
                )
        self.names = distinct_names(functions)
        self._functions = tuple(functions)
        self._weights = tuple(weights) or (1.0,) * len(functions)
        self._deadline_s = deadline_s
        self._offload = offload or DaemonThreads(limit=CALLS_AT_ONCE)

    async def score(self, group: Group) -> Group:
        """The group with ``scores`` and ``reward`` of its ok episodes filled in; others pass through as they are."""
        ok = [e for e in group.episodes if e.status == "ok"]
        if not ok:
            return group
        columns = _columns(group, ok)
        answers: dict[str, list[Score]] = {}

        async def ask(name: str, function: Function) -> None:
            answers[name] = await self._ask(name, function, columns, count=len(ok))

        async with anyio.create_task_group() as tasks:
            for name, function in zip(self.names, self._functions, strict=True):
                tasks.start_soon(ask, name, function)
        scored = iter(self._combine(e, {n: answers[n][at] for n in self.names}) for at, e in enumerate(ok))
        episodes = tuple(next(scored) if e.status == "ok" else e for e in group.episodes)
        return msgspec.structs.replace(group, episodes=episodes)

    async def _ask(self, name: str, function: Function, columns: Mapping[str, list[Any]], *, count: int) -> list[Score]:
        """One score per episode; every way to fail is turned into data here."""
        with anyio.move_on_after(self._deadline_s) as deadline:
            try:
                answer = await self._call(function, columns)
            except Exception as error:  # user code: anything may come, and it costs these episodes only
                return [Failure("failed", f"{name}: {type(error).__name__}: {error}")] * count
            return _read(name, answer, count=count)
        assert deadline.cancelled_caught
        return [Failure("timeout", f"{name}: no answer within reward.deadline_s = {self._deadline_s:g} s")] * count

    async def _call(self, function: Function, columns: Mapping[str, list[Any]]) -> Any:
        takes = accepted(function)
        # Lists of their own: a function may change what it is given.
        arguments = {name: list(values) for name, values in columns.items() if takes is None or name in takes}
        if _is_async(function):
            return await function(**arguments)
        answer = await self._offload(lambda: function(**arguments))
        return await answer if inspect.isawaitable(answer) else answer

    def _combine(self, episode: Episode, scores: Mapping[str, Score]) -> Episode:
        numbers = {name: s for name, s in scores.items() if not isinstance(s, Failure)}
        failures = [s for s in scores.values() if isinstance(s, Failure)]
        if failures:
            status = "timeout" if all(f.status == "timeout" for f in failures) else "failed"
            error = "; ".join(f.error for f in failures)
            return msgspec.structs.replace(episode, scores=numbers, status=status, error=error)
        terms = [
            weight * number
            for name, weight in zip(self.names, self._weights, strict=True)
            if (number := numbers[name]) is not None
        ]
        return msgspec.structs.replace(episode, scores=numbers, reward=sum(terms) if terms else None)


def build(config: Reward, *, offload: Offload | None = None) -> FunctionScorer:
    """The scorer a config's ``reward`` section asks for. Raises ConfigError."""
    functions = [resolve(name) for name in config.functions]
    return FunctionScorer(functions, weights=config.weights, deadline_s=config.deadline_s, offload=offload)


def _columns(group: Group, episodes: Sequence[Episode]) -> dict[str, list[Any]]:
    columns: dict[str, list[Any]] = {name: [value] * len(episodes) for name, value in group.prompt.fields.items()}
    columns["prompts"] = [group.prompt.text] * len(episodes)
    columns["completions"] = [e.text for e in episodes]
    columns["completion_ids"] = [[int(t) for c in e.completions for t in c.tokens] for e in episodes]
    return columns


def _is_async(function: Function) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def _read(name: str, answer: Any, *, count: int) -> list[Score]:
    values = _as_list(answer)
    if values is None:
        shape = f"answered with {type(answer).__name__}, a list of {count} numbers or None is needed"
        return [Failure("failed", f"{name}: {shape}")] * count
    if len(values) != count:
        return [Failure("failed", f"{name}: answered with {len(values)} values for {count} completions")] * count
    return [_number(name, value) for value in values]


def _as_list(answer: Any) -> list[Any] | None:
    if isinstance(answer, str | bytes | Mapping):
        return None
    try:
        return list(answer)
    except TypeError:
        return None


def _number(name: str, value: Any) -> Score:
    if value is None:
        return None
    try:
        number = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        return Failure("failed", f"{name}: answered with {value!r}, a finite number or None is needed")
    return number
