"""Imports packages that only some environments need."""

from __future__ import annotations

import importlib
from typing import Any

from corrente.errors import ConfigError


def import_package(module: str, *, of: str, install: str) -> Any:
    """Import a module. ConfigError, with the install command, where it is missing."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"env.factory: {of} needs a package: pip install {install} ({error})") from error
