"""Order of completion, no depth. Age is bounded by staleness.reject or staleness.mask alone.

Admission keeps a fixed number of groups generating, whatever the learner does, so finished groups pile up when the generator is
faster, and ``take`` hands out the ones that finished first: the oldest are rejected by version as they come up. What is held is
therefore bounded by the generator's rate times the allowed age. A slow group is overtaken without limit.
"""

from __future__ import annotations

from collections.abc import Sequence

from corrente.buffer.base import BufferSize, Occupancy, Ticket
from corrente.common.waiting import Condition
from corrente.data.types import Group
from corrente.errors import EndOfStream, LedgerError


def build(size: BufferSize, *, first_ticket: int = 0) -> StreamBuffer:
    """A stream in which ``size.generating`` groups generate at once."""
    return StreamBuffer(inflight=size.generating, first_ticket=first_ticket)


class StreamBuffer:
    """Implements Buffer; ``inflight`` groups generate at once."""

    def __init__(self, *, inflight: int, first_ticket: int = 0) -> None:
        """Raises ValueError for ``inflight`` below 1."""
        if inflight < 1:
            raise ValueError(f"inflight {inflight} must be at least 1")
        self._inflight = inflight
        self._next = first_ticket
        self._generating: set[int] = set()
        self._ready: dict[int, Group] = {}
        self._taken: set[int] = set()
        self._closed = False
        self._changed = Condition()

    async def reserve(self) -> Ticket:
        await self._changed.wait_for(lambda: self._closed or len(self._generating) < self._inflight)
        if self._closed:
            raise EndOfStream("the buffer is closed for admission")
        ticket = Ticket(self._next)
        self._next += 1
        self._generating.add(ticket.id)
        return ticket

    def put(self, group: Group) -> None:
        if group.id not in self._generating:
            raise LedgerError(f"group {group.id} was put twice, or never admitted")
        self._generating.remove(group.id)
        self._ready[group.id] = group
        self._changed.notify_all()

    def drop(self, ticket: int) -> None:
        if ticket in self._generating:
            self._generating.remove(ticket)
        elif ticket in self._taken:
            self._taken.remove(ticket)
        elif self._ready.pop(ticket, None) is None:
            raise LedgerError(f"group {ticket} was dropped twice, or never admitted")
        self._changed.notify_all()

    async def take(self, count: int) -> list[Group]:
        await self._changed.wait_for(lambda: len(self._ready) >= count or (self._closed and not self._generating))
        ids = sorted(list(self._ready)[:count])
        self._taken.update(ids)
        return [self._ready.pop(i) for i in ids]

    def release(self, groups: Sequence[int]) -> None:
        self._taken.difference_update(groups)

    def close(self) -> None:
        self._closed = True
        self._changed.notify_all()

    def occupancy(self) -> Occupancy:
        return Occupancy(generating=len(self._generating), ready=len(self._ready), training=len(self._taken), slots=0)
