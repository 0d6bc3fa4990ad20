"""From what a config says to a callable: a built-in name, "package.module:function", or "path/to/file.py:function"."""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from corrente.errors import ConfigError
from corrente.score.builtins import BUILTINS

Function = Callable[..., Any]

GIVEN = ("prompts", "completions", "completion_ids")
"""What every reward function may ask for besides the dataset's columns."""


def resolve(name: str) -> Function:
    """Import the function ``name`` says. Raises ConfigError when there is none, or when it is not callable."""
    if name in BUILTINS:
        return BUILTINS[name]
    place, colon, attribute = name.rpartition(":")
    if not colon or not place or not attribute:
        known = ", ".join(map(repr, BUILTINS))
        raise ConfigError(
            f"reward.functions = {name!r}: no such function; write a built-in name ({known}), "
            '"package.module:function" or "path/to/file.py:function"'
        )
    found: Any = _module(place, name)
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise ConfigError(f"reward.functions = {name!r}: {place} has no {attribute!r}{_offers(found)}")
        found = getattr(found, part)
    if not callable(found):
        raise ConfigError(
            f"reward.functions = {name!r}: {attribute} is of type {type(found).__name__}; it must be callable"
        )
    return found


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


def _module(place: str, name: str) -> ModuleType:
    try:
        if place.endswith(".py"):
            return _from_file(Path(place), name)
        if (here := str(Path.cwd())) not in sys.path:
            sys.path.append(here)  # last, so that it shadows nothing
        return importlib.import_module(place)
    except ConfigError:
        raise
    except Exception as error:  # whatever the user's module does when it is imported
        raise ConfigError(
            f"reward.functions = {name!r}: {place} cannot be imported: {type(error).__name__}: {error}"
        ) from error


def _from_file(path: Path, name: str) -> ModuleType:
    if not path.is_file():
        raise ConfigError(f"reward.functions = {name!r}: the file {path} does not exist")
    # A name of its own per path, so that reward files called alike do not shadow one another or a real module.
    module_name = (
        f"corrente_reward_{path.stem}_{hashlib.blake2b(str(path.resolve()).encode(), digest_size=4).hexdigest()}"
    )
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"reward.functions = {name!r}: {path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses and pickling look a module up by name while it is executed
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[module_name]
        raise
    return module


def _offers(module: Any) -> str:
    own = (
        [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        if hasattr(module, "__dict__")
        else []
    )
    return f"; it has {', '.join(own[:8])}" if own else ""
