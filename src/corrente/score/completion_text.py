"""The text of a completion, whichever shape a reward function is given it in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Completion = str | Sequence[Mapping[str, Any]]


def said(completion: Completion) -> str:
    """The text of a completion; of messages, that of the last of the assistant's that has any."""
    if isinstance(completion, str):
        return completion
    texts = (str(m["content"]) for m in reversed(completion) if m.get("role") == "assistant" and m.get("content"))
    return next(texts, "")
