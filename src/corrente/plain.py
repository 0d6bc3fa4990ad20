"""What users' code gives, as data that can be kept, sent and written."""

from __future__ import annotations

from typing import Any

import msgspec


def plain(value: Any) -> Any:
    """A value that can be written: numbers of numpy or torch become Python's, what has no plain form its text."""
    item = value.item() if hasattr(value, "item") and not getattr(value, "shape", ()) else value
    try:
        msgspec.msgpack.encode(item)
    except (TypeError, OverflowError):
        return str(item)
    return item
