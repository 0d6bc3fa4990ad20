"""The paths that a config names: ``~`` is the user's home, and a run resolves what is relative once, when it begins."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from corrente.config import RunConfig

Value = TypeVar("Value")

PATH_FIELDS = ("path", "eval_path", "init", "template", "dir")
"""Fields of sections that may name a file or a folder."""


def map_paths(value: Value, convert: Callable[[str], str]) -> Value:
    """``value``, a section or what sections hold, with every path converted, those of "FILE.py:FUNCTION" too."""
    if isinstance(value, msgspec.Struct):
        changes = {name: _convert(name, getattr(value, name), convert) for name in value.__struct_fields__}
        changed = {name: new for name, new in changes.items() if new is not getattr(value, name)}
        return msgspec.structs.replace(value, **changed) if changed else value
    return value


def _convert(name: str, value: Any, convert: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        file, colon, attribute = value.rpartition(":")
        if colon and file.endswith(".py") and attribute.isidentifier():
            return f"{convert(file)}:{attribute}"
        return convert(value) if value and name in PATH_FIELDS else value
    if isinstance(value, tuple):
        items = tuple(_convert("", item, convert) for item in value)
        return items if any(new is not old for new, old in zip(items, value, strict=True)) else value
    return map_paths(value, convert)


def expand_home(path: str) -> str:
    """The path with the user's home for ``~``; as it is where there is no such user."""
    if not path.startswith("~"):
        return path
    try:
        return str(Path(path).expanduser())
    except RuntimeError:
        return path


def absolute_paths(config: RunConfig) -> RunConfig:
    """The config with absolute paths for relative ones that exist, and for run.dir. What names a model or a data set stays."""

    def absolute(path: str) -> str:
        path = expand_home(path)
        try:
            return str(Path(path).absolute()) if Path(path).exists() else path
        except (OSError, ValueError):  # the text of a template
            return path

    config = map_paths(config, absolute)
    folder = str(Path(expand_home(config.run.dir)).absolute())
    return msgspec.structs.replace(config, run=msgspec.structs.replace(config.run, dir=folder))
