"""The states of a replica as a pure state machine: no tasks, no clock, no engine.

    DEAD --launched--> STARTING --started--> STALE --holds the current version--> READY
                           |                   ^                                    |
                           |                   +---- missed an update, or leaves ---+
      ^                    |                   |                                    |
      +------- died -------+-------------------+------------------------------------+

Only a READY replica gets requests, and the only way to READY is to hold the version that is current: one that was restarted,
came late or missed an update comes through STALE. A transition that is not drawn here is our own bug (LedgerError).
"""

from __future__ import annotations

from enum import Enum

import msgspec

from corrente.errors import LedgerError


class State(Enum):
    """The states of a replica; see the module."""

    DEAD = "dead"
    STARTING = "starting"
    STALE = "stale"
    READY = "ready"


class Health(msgspec.Struct, frozen=True):
    """A replica's state, and the version it holds: None before the first weights, and after a death."""

    state: State = State.DEAD
    version: int | None = None

    def launched(self) -> Health:
        """A process is being started."""
        self._only(State.DEAD)
        return Health(State.STARTING)

    def started(self) -> Health:
        """The replica can take weights, and has none."""
        self._only(State.STARTING)
        return Health(State.STALE)

    def holds(self, version: int, *, current: int) -> Health:
        """The replica applied ``version``; ``current`` is the version that the run samples from."""
        self._only(State.STALE, State.READY)
        return Health(State.READY if version == current else State.STALE, version)

    def missed(self) -> Health:
        """The replica did not get an update that others have, or is about to leave: no more requests. It keeps its weights."""
        self._only(State.STALE, State.READY)
        return Health(State.STALE, self.version)

    def died(self) -> Health:
        """The replica is gone, whatever its state was, and its weights with it."""
        return Health(State.DEAD)

    def _only(self, *allowed: State) -> None:
        if self.state not in allowed:
            raise LedgerError(f"a replica that is {self.state.name} cannot do this; only one that is {allowed} can")
