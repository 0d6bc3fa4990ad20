"""The content of a chat message: text, or a list of parts as multimodal models have them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from corrente.errors import RolloutError


def content_text(content: Any) -> str:
    """The content as one text: that of its parts, one after another. RolloutError for a part that is no text."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list | tuple):
        return str(content)
    return "".join(map(_part_text, cast("Sequence[Any]", content)))


def _part_text(part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = type(part).__name__
    if isinstance(part, Mapping):
        fields = cast("Mapping[str, Any]", part)
        if isinstance(text := fields.get("text"), str):
            return text
        kind = str(fields.get("type", kind))
    raise RolloutError(
        f"a message has a part of {kind!r} in its content; prompts are text, so every part must have a 'text'"
    )
