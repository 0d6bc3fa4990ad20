"""Strictly alternating: as many slots as one version trains on, so nothing is generated while weights are being published."""

from __future__ import annotations

from corrente.buffer.base import BufferSize
from corrente.buffer.window import WindowBuffer


def build(size: BufferSize, *, first_ticket: int = 0) -> WindowBuffer:
    """The window of depth S = 0: a group is admitted only when the weights of all earlier ones are live. Age 0."""
    return WindowBuffer(slots=size.groups_per_version, window=1, first_ticket=first_ticket)
