"""Bounded slots, admission order, a look-ahead window anchored at the oldest group.

``line`` holds the groups from the oldest one not yet taken onward, in admission order, those taken out of turn included: a
group may be taken when fewer than W entries of the line precede it. So at most W - 1 groups overtake any other, however slow it
is, and dropped groups, which leave the line, cost nobody their place. With B slots this bounds age; see staleness/gate.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Literal

from corrente.buffer.base import BufferSize, Occupancy, Ticket
from corrente.common.waiting import Condition
from corrente.data.types import Group
from corrente.errors import EndOfStream, LedgerError

_Entry = Group | Literal["generating", "taken"]


def build(size: BufferSize, *, first_ticket: int = 0) -> WindowBuffer:
    """The window of the size that the config implies."""
    return WindowBuffer(slots=size.slots, window=size.window, first_ticket=first_ticket)


class WindowBuffer:
    """Implements Buffer. At most ``slots`` groups are between admission and live weights; ``window`` 1 is first in, first out."""

    def __init__(self, *, slots: int, window: int, first_ticket: int = 0) -> None:
        """Raises ValueError unless 1 <= ``window`` <= ``slots``."""
        if not 1 <= window <= slots:
            raise ValueError(f"window {window} must lie in 1..{slots} (the slots)")
        self._slots = slots
        self._window = window
        self._next = first_ticket
        self._line: dict[int, _Entry] = {}
        self._taken: set[int] = set()
        self._untaken = 0
        self._ready = 0
        self._closed = False
        self._changed = Condition()

    async def reserve(self) -> Ticket:
        await self._changed.wait_for(lambda: self._closed or self._untaken + len(self._taken) < self._slots)
        if self._closed:
            raise EndOfStream("the buffer is closed for admission")
        ticket = Ticket(self._next)
        self._next += 1
        self._line[ticket.id] = "generating"
        self._untaken += 1
        return ticket

    def put(self, group: Group) -> None:
        if self._line.get(group.id) != "generating":
            raise LedgerError(f"group {group.id} was put twice, or never admitted")
        self._line[group.id] = group
        self._ready += 1
        self._changed.notify_all()

    def drop(self, ticket: int) -> None:
        if ticket in self._taken:
            self._taken.remove(ticket)
            self._line.pop(ticket, None)
        else:
            entry = self._line.pop(ticket, None)
            if entry is None:
                raise LedgerError(f"group {ticket} was dropped twice, or never admitted")
            self._untaken -= 1
            self._ready -= isinstance(entry, Group)
        self._advance()
        self._changed.notify_all()

    async def take(self, count: int) -> list[Group]:
        await self._changed.wait_for(lambda: len(self._eligible(count)) == self._wanted(count))
        groups = self._eligible(count)
        for group in groups:
            self._line[group.id] = "taken"
            self._taken.add(group.id)
        self._untaken -= len(groups)
        self._ready -= len(groups)
        self._advance()
        return groups

    def release(self, groups: Sequence[int]) -> None:
        self._taken.difference_update(groups)
        self._changed.notify_all()

    def close(self) -> None:
        self._closed = True
        self._changed.notify_all()

    def occupancy(self) -> Occupancy:
        return Occupancy(
            generating=self._untaken - self._ready, ready=self._ready, training=len(self._taken), slots=self._slots
        )

    def _wanted(self, count: int) -> int:
        return min(count, self._untaken) if self._closed else count

    def _eligible(self, count: int) -> list[Group]:
        """The oldest ready groups inside the window, which moves on as the oldest ones are picked."""
        if self._ready < self._wanted(count):
            return []
        picked: list[Group] = []
        gone = [False] * min(len(self._line), self._window + count)
        anchor = 0
        for at, entry in enumerate(islice(self._line.values(), len(gone))):
            if at >= anchor + self._window or len(picked) == count:
                break
            gone[at] = entry != "generating"
            if isinstance(entry, Group):
                picked.append(entry)
            while anchor < len(gone) and gone[anchor]:
                anchor += 1
        return picked

    def _advance(self) -> None:
        """Entries taken out of turn leave the line once everything older has."""
        while self._line:
            oldest = next(iter(self._line))
            if self._line[oldest] != "taken":
                return
            del self._line[oldest]
