"""The text of a completion, in whichever shape reward functions get it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from corrente.data.messages import content_text

Completion = str | Sequence[Mapping[str, Any]]


def completion_text(completion: Completion) -> str:
    """The text of a completion; of messages, the text of the last assistant message that has any."""
    if isinstance(completion, str):
        return completion
    texts = (
        content_text(m["content"]) for m in reversed(completion) if m.get("role") == "assistant" and m.get("content")
    )
    return next(texts, "")
