"""The buffer's contract. The whole flow control is here: admission is the only throttle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from corrente.data.types import Group


class Ticket(msgspec.Struct, frozen=True):
    """Admission number of a group: unique in a run, increasing, never reused."""

    id: int


class BufferSize(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers a buffer is built from, all in groups. A config implies them; staleness/gate.py derives them.

    ``groups_per_version``: Q, trained between two versions. ``slots``: B, admitted and not yet live as weights; 0: no limit.
    ``window``: W, how far past the oldest group ``take`` looks; 0: it takes in order of completion. ``generating``: how many
    generate at once at most.
    """

    groups_per_version: int
    slots: int
    window: int
    generating: int


class Occupancy(msgspec.Struct, frozen=True, kw_only=True):
    """Groups by where they are, and the number of slots (0: no limit)."""

    generating: int
    ready: int
    training: int
    slots: int


class Buffer(Protocol):
    """Contract. A group holds one slot from ``reserve`` until ``release`` of the weights trained on it, or until ``drop``.

    - ``reserve`` waits for a free slot and admits one group; EndOfStream once closed. Cancelling it admits nothing.
    - ``put`` hands in the finished group of a ticket; ``drop`` ends a ticket that will not be trained (whether generating,
      ready or taken) and frees its slot at once. Neither waits. Each ticket is put at most once.
    - ``take`` waits for ``count`` groups that may be consumed, and returns them in admission order; fewer only when the
      buffer is closed and no more can come. Cancelling it takes nothing.
    - ``release`` says that the weights trained on ``groups`` are live: their slots are free.
    - ``close`` ends admission; groups admitted before still come out.
    """

    async def reserve(self) -> Ticket: ...

    def put(self, group: Group) -> None: ...

    def drop(self, ticket: int) -> None: ...

    async def take(self, count: int) -> list[Group]: ...

    def release(self, groups: Sequence[int]) -> None: ...

    def close(self) -> None: ...

    def occupancy(self) -> Occupancy: ...
