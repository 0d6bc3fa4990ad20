"""The run's own record of time: when it began, when something last moved, who waits for what; spans and events to the sink."""

from __future__ import annotations

import anyio

from corrente.common.waiting import WaitRegistry
from corrente.observe.base import Sink


class Journal:
    """Seconds are those of ``anyio.current_time()``, counted from the start of the run, an earlier part's included."""

    def __init__(self, sink: Sink, *, before_s: float = 0.0) -> None:
        self.sink = sink
        self.waits = WaitRegistry()
        self._before_s = before_s
        self._start_s = self._moved_s = anyio.current_time()

    @property
    def elapsed_s(self) -> float:
        return self._before_s + anyio.current_time() - self._start_s

    @property
    def moved_s(self) -> float:
        """When something last made progress, by anyio's clock."""
        return self._moved_s

    def moved(self, at_s: float | None = None) -> None:
        """Something made progress, now or at ``at_s``: the watchdog's patience starts anew."""
        self._moved_s = max(self._moved_s, anyio.current_time() if at_s is None else at_s)

    def span(self, track: str, name: str, start_s: float, **attrs: object) -> None:
        """``name`` on ``track``, from ``start_s`` until now."""
        self.sink.log_span(track, name, start_s, self.elapsed_s, attrs)
