"""Routing sends a request to the least loaded replica, unless its group is at home on another.

The members of a group have the same prompt; on one replica it is computed once. So a group has a home, the replica that its
first live member was sent to, and later members follow there, unless that starves another replica. The rule:

    a request goes home while home has fewer than ``slack`` requests more than the least loaded replica, and a free row,
    or none has; otherwise it goes to the least loaded, which becomes the group's home

The bound that follows: no request is ever sent to a replica that has ``slack`` live requests more than another that is ready,
or that has no free row while another has one. With ``slack`` the size of a group, a group that starts is never split on a pool in
balance. Pure: takes counts and names, returns a name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping


class Router:
    """Remembers the homes of groups. ``slack``: requests that a home may have more than the least loaded replica. ``rows``:
    requests a replica serves at once."""

    def __init__(self, *, slack: int, rows: int) -> None:
        self._slack, self._rows = slack, rows
        self._homes: dict[str, str] = {}
        self._members: Counter[str] = Counter()

    def route(self, group: str, loads: Mapping[str, int]) -> str:
        """The replica for a request of ``group`` ("": of none), by the live requests of each that is ready; not empty.
        Follow it by ``joined``, or forget the answer."""
        least = min(loads, key=lambda name: (loads[name], name))
        home = self._homes.get(group, least)
        if home not in loads:
            return least
        starves = loads[home] - loads[least] >= self._slack
        crowded = loads[home] >= self._rows > loads[least]
        return least if starves or crowded else home

    def joined(self, group: str, name: str) -> None:
        """A member of ``group`` was sent to ``name``."""
        if group:
            self._homes[group] = name
            self._members[group] += 1

    def left(self, group: str) -> None:
        """A member of ``group`` ended. A group without live members has no home."""
        if not group:
            return
        self._members[group] -= 1
        if self._members[group] <= 0:
            del self._members[group]
            self._homes.pop(group, None)
