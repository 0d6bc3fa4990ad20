"""How many tokens an engine takes, prompt and completion together, as far as a model's own files say."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

DEFAULT_CONTEXT = 4096
"""Where neither a config nor the model says less."""


def context(folder: Path, wanted: int, *, windowed: bool) -> int:
    """What an engine takes of the model in ``folder``, where ``wanted`` is engine.max_context; a folder that cannot be read says
    nothing. ``windowed``: see positions."""
    return wanted or min(limit(folder, windowed=windowed) or DEFAULT_CONTEXT, DEFAULT_CONTEXT)


def vocabulary(folder: Path) -> int | None:
    """How many tokens the model in ``folder`` knows; None where the folder does not say."""
    return _shape(folder).get("vocab_size")


def limit(folder: Path, *, windowed: bool) -> int | None:
    """See positions; None as well where the folder cannot be read."""
    return positions(_shape(folder), windowed=windowed)


def _shape(folder: Path) -> Mapping[str, Any]:
    """The configuration of its language model; empty where the folder cannot be read."""
    try:
        shape = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return {}
    return shape.get("text_config") or shape


def positions(shape: Mapping[str, Any], *, windowed: bool) -> int | None:
    """Tokens that a model knows positions for; None where its configuration does not say. ``windowed``: the engine looks no
    further than a sliding window spans, since within it every mask is causal."""
    known = [shape.get("max_position_embeddings"), shape.get("n_positions")]
    if windowed and shape.get("use_sliding_window", True):
        known.append(shape.get("sliding_window"))
    return min((int(value) for value in known if value), default=None)
