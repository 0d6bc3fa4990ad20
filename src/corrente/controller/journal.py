"""The run's record of time: when it began, when something last moved, who waits for what; spans and events go to the sink."""

from __future__ import annotations

import anyio

from corrente.common.waiting import WaitRegistry
from corrente.observe.base import Sink

GROUPS_WAIT = ("learn", "groups")
FLIP_WAIT = ("learn", "the flip of the version before")
SLOT_WAIT = ("feed", "a free slot")
"""The waits that are reported as fractions of the time (reporter.py): the stage that waits, and the thing it waits for."""


class Journal:
    """Seconds are those of ``anyio.current_time()``, counted from the start of the run, an earlier part's included."""

    def __init__(self, sink: Sink, *, before_s: float = 0.0) -> None:
        """``before_s``: seconds that an earlier part of the run took."""
        self.sink = sink
        self.waits = WaitRegistry()
        self._before_s = before_s
        self._start_s = self._moved_s = anyio.current_time()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start of the run."""
        return self._before_s + anyio.current_time() - self._start_s

    @property
    def moved_s(self) -> float:
        """The time of the last progress, by anyio's clock."""
        return self._moved_s

    def moved(self, at_s: float | None = None) -> None:
        """Something made progress, now or at ``at_s``: the watchdog's patience starts anew."""
        self._moved_s = max(self._moved_s, anyio.current_time() if at_s is None else at_s)

    def span(self, track: str, name: str, start_s: float, **attrs: object) -> None:
        """Report ``name`` on ``track``, from ``start_s`` until now."""
        self.sink.log_span(track, name, start_s, self.elapsed_s, attrs)
