"""Context limits and vocabulary size, read from a model's own files without loading it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

DEFAULT_CONTEXT = 4096
"""The largest context, in tokens, that an engine takes unless ``engine.max_context`` asks for more."""


def context_tokens(folder: Path, wanted: int, *, windowed: bool) -> int:
    """Tokens of prompt and completion together that an engine takes of the model in ``folder``.

    ``wanted`` is ``engine.max_context``; 0 takes the model's own limit, at most DEFAULT_CONTEXT. A folder that cannot be read
    counts as a model without a limit. ``windowed``: see ``max_positions``.
    """
    return wanted or min(position_limit(folder, windowed=windowed) or DEFAULT_CONTEXT, DEFAULT_CONTEXT)


def vocabulary_size(folder: Path) -> int | None:
    """The vocabulary size of the model in ``folder``; None where its configuration does not say."""
    return _text_config(folder).get("vocab_size")


def position_limit(folder: Path, *, windowed: bool) -> int | None:
    """``max_positions`` of the model in ``folder``; None as well where the folder cannot be read."""
    return max_positions(_text_config(folder), windowed=windowed)


def model_type(folder: Path) -> str:
    """The family of a model, as its config.json names it; empty when it does not."""
    return str(_text_config(folder).get("model_type", ""))


def _text_config(folder: Path) -> Mapping[str, Any]:
    """The configuration of the language model in ``folder``; empty where the folder cannot be read."""
    try:
        shape = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return {}
    return shape.get("text_config") or shape


def max_positions(config: Mapping[str, Any], *, windowed: bool) -> int | None:
    """The number of positions a model was built for; None where its configuration does not say.

    ``windowed``: count no more than the sliding window spans, for an engine whose masks are plainly causal: within the window a
    causal mask and a sliding one are the same.
    """
    known = [config.get("max_position_embeddings"), config.get("n_positions")]
    if windowed and config.get("use_sliding_window", True):
        known.append(config.get("sliding_window"))
    return min((int(value) for value in known if value), default=None)
