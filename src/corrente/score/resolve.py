"""From what a config says to a callable: a built-in name, "package.module:function", or "path/to/file.py:function"."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from corrente.common.imports import import_callable
from corrente.score.builtins import BUILTINS

Function = Callable[..., Any]

GIVEN = ("prompts", "completions", "completion_ids", "environments", "trainer_state", "log_extra", "log_metric")
"""What every reward function may ask for besides the dataset's columns."""


def resolve(name: str, *, key: str = "reward.functions") -> Function:
    """A built-in function, or what ``named.find`` finds."""
    return BUILTINS[name] if name in BUILTINS else import_callable(name, key=key, builtins=BUILTINS)


def name_of(function: Function) -> str:
    """A name for messages and metrics: the function's own, that of what a partial wraps, or the class's."""
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__name__", type(function).__name__)
    return "lambda" if name == "<lambda>" else str(name)


def distinct_names(functions: Sequence[Function]) -> tuple[str, ...]:
    """Their names, numbered from the second on where they repeat."""
    names: list[str] = []
    for function in functions:
        name = base = name_of(function)
        number = 1
        while name in names:
            number += 1
            name = f"{base}_{number}"
        names.append(name)
    return tuple(names)


def accepted(function: Function) -> frozenset[str] | None:
    """Names of the keyword arguments it takes; None: any. Signatures that cannot be read count as any."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return frozenset(p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))


def needed(function: Function) -> tuple[str, ...]:
    """Names of the arguments it cannot do without."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return ()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return tuple(p.name for p in parameters if p.kind in kinds and p.default is p.empty)
