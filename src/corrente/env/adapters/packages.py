"""Packages that only some environments need."""

from __future__ import annotations

import importlib
from typing import Any

from corrente.errors import ConfigError


def package(module: str, *, of: str, install: str) -> Any:
    """The module, imported. ConfigError, with what to install, where it is missing."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"env.factory: {of} needs a package: pip install {install} ({error})") from error
