"""Resolves a reward function's name: a built-in one, "package.module:function", or "path/to/file.py:function"."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from corrente.common.imports import import_callable
from corrente.score.builtins import BUILTINS

Function = Callable[..., Any]

OFFERED_ARGUMENTS = (
    "prompts",
    "completions",
    "completion_ids",
    "environments",
    "trainer_state",
    "log_extra",
    "log_metric",
)
"""Arguments on offer to every reward function besides the dataset's columns."""


def resolve_function(name: str, *, key: str = "reward.functions") -> Function:
    """Find a built-in function, or import one with ``import_callable``."""
    return BUILTINS[name] if name in BUILTINS else import_callable(name, key=key, builtins=BUILTINS)


def function_name(function: Function) -> str:
    """A function's name in messages and metrics: its own, that of the function in a partial, or its class's."""
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__name__", type(function).__name__)
    return "lambda" if name == "<lambda>" else str(name)


def distinct_names(functions: Sequence[Function]) -> tuple[str, ...]:
    """Names of functions, numbered from the second on where they repeat."""
    names: list[str] = []
    for function in functions:
        name = base = function_name(function)
        number = 1
        while name in names:
            number += 1
            name = f"{base}_{number}"
        names.append(name)
    return tuple(names)


def accepted_arguments(function: Function) -> frozenset[str] | None:
    """Names of the keyword arguments a function takes; None: any. A signature that cannot be read counts as any."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return frozenset(p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))


def required_arguments(function: Function) -> tuple[str, ...]:
    """Names of the arguments without a default."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return ()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return tuple(p.name for p in parameters if p.kind in kinds and p.default is p.empty)
