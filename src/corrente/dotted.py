"""Implementations by name: what is chosen by a config is imported where and when it is chosen, and not before."""

from __future__ import annotations

import importlib
from typing import Any

from corrente.errors import ConfigError


def load(path: str) -> Any:
    """The object a dotted path "module:attribute" names; ConfigError when there is none."""
    module, _, attribute = path.partition(":")
    found = getattr(importlib.import_module(module), attribute, None)
    if found is None:
        raise ConfigError(f"{path!r} names nothing: module {module} has no {attribute!r}")
    return found
