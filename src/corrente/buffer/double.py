"""One version ahead: the groups of the next version are generated while those of this one are trained on."""

from __future__ import annotations

from corrente.buffer.base import BufferSize
from corrente.buffer.window import WindowBuffer


def build(size: BufferSize, *, first_ticket: int = 0) -> WindowBuffer:
    """The window of depth S = 1, first in, first out. Age at most 1."""
    return WindowBuffer(slots=2 * size.groups_per_version, window=1, first_ticket=first_ticket)
