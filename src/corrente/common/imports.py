"""Import objects by name: the implementations that a config chooses, and the user's callables.

An implementation is imported when it is chosen, and not before: a run that does not use torch does not import it.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from corrente.errors import ConfigError


def load_object(path: str) -> Any:
    """Import the object that a path "package.module:attribute" names; ConfigError when there is none."""
    module, _, attribute = path.partition(":")
    found = getattr(importlib.import_module(module), attribute, None)
    if found is None:
        raise ConfigError(f"{path!r} names nothing: module {module} has no {attribute!r}")
    return found


def import_callable(name: str, *, key: str, builtins: Iterable[str] = ()) -> Callable[..., Any]:
    """Import the callable "package.module:function" or "path/to/file.py:function" that the config key ``key`` names.

    ConfigError, which names ``key``, when there is none or it is not callable. ``builtins``: names that the key allows as well,
    for that message.
    """
    place, colon, attribute = name.rpartition(":")
    if not colon or not place or not attribute:
        known = ", ".join(map(repr, builtins))
        raise ConfigError(
            f"{key} = {name!r}: no such function; write {f'a built-in name ({known}), ' if known else ''}"
            '"package.module:function" or "path/to/file.py:function"'
        )
    found: Any = _import_module(place, name, key)
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise ConfigError(f"{key} = {name!r}: {place} has no {attribute!r}{_list_callables(found)}")
        found = getattr(found, part)
    if not callable(found):
        raise ConfigError(f"{key} = {name!r}: {attribute} is of type {type(found).__name__}; it must be callable")
    return found


def _import_module(place: str, name: str, key: str) -> ModuleType:
    try:
        if place.endswith(".py"):
            return _import_file(Path(place), name, key)
        if (here := str(Path.cwd())) not in sys.path:
            sys.path.append(here)  # last, so that it shadows nothing
        return importlib.import_module(place)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:  # whatever the user's module does when it is imported
        raise ConfigError(f"{key} = {name!r}: {place} cannot be imported: {type(error).__name__}: {error}") from error


def _import_file(path: Path, name: str, key: str) -> ModuleType:
    if not path.is_file():
        raise ConfigError(f"{key} = {name!r}: the file {path} does not exist")
    # A name of its own per path, so that files called alike do not shadow one another or a real module.
    module_name = (
        f"corrente_user_{path.stem}_{hashlib.blake2b(str(path.resolve()).encode(), digest_size=4).hexdigest()}"
    )
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{key} = {name!r}: {path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses and pickling look a module up by name while it is executed
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[module_name]
        raise
    return module


def _list_callables(module: Any) -> str:
    own = (
        [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        if hasattr(module, "__dict__")
        else []
    )
    return f"; it has {', '.join(own[:8])}" if own else ""
