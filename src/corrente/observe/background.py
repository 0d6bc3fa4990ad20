"""A sink in a thread of its own, for those that import much, talk to the network, or may hang.

Calls are put into a bounded queue and return at once. What cannot be put, because the sink is far behind, is dropped and counted.
What the sink raises is raised by the next call, so that ``Fanout`` reports it and goes on without. A sink that hangs is left
behind: its thread is a daemon, and closing waits no longer than ``patience_s``.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from typing import Any

from corrente.observe.base import Sink

DEPTH = 1000
"""Calls that may wait."""
PATIENCE_S = 30.0

Call = Callable[[Sink], None]


class Beside:
    """Implements Sink. ``make`` builds the sink in its thread."""

    def __init__(
        self, make: Callable[[], Sink], *, name: str, depth: int = DEPTH, patience_s: float = PATIENCE_S
    ) -> None:
        self.name, self._patience_s = name, patience_s
        self._calls: queue.Queue[Call | None] = queue.Queue(depth)
        self._failure: Exception | None = None
        self._dropped = 0
        self._closed = False
        self._thread = threading.Thread(target=self._run, args=(make,), name=f"tracker {name}", daemon=True)
        self._thread.start()

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        kept = dict(values)
        self._put(lambda sink: sink.metrics(step, kept))

    def span(self, track: str, name: str, start_s: float, stop_s: float, attrs: Mapping[str, Any]) -> None:
        pass

    def sample(self, step: int, sample: Mapping[str, Any]) -> None:
        kept = dict(sample)
        self._put(lambda sink: sink.sample(step, kept))

    def event(self, level: str, message: str) -> None:
        self._put(lambda sink: sink.event(level, message))

    def close(self) -> None:
        """Wait for what is queued. TimeoutError when it takes longer than ``patience_s``; RuntimeError if some was dropped. A
        second time nothing happens."""
        if self._closed:
            return
        self._closed = True
        self._check()
        try:
            self._calls.put(None, timeout=self._patience_s)
            self._thread.join(self._patience_s)
        except queue.Full:
            pass
        if self._thread.is_alive():
            raise TimeoutError(f"{self.name} was not done within {self._patience_s:g} s, and is left behind")
        self._check()
        if self._dropped:
            raise RuntimeError(f"{self.name} was too slow: {self._dropped} records are missing there")

    def _put(self, call: Call) -> None:
        self._check()
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self._dropped += 1

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _run(self, make: Callable[[], Sink]) -> None:
        try:
            sink = make()
            while (call := self._calls.get()) is not None:
                call(sink)
            sink.close()
        except BaseException as error:  # a tracker is anybody's code: what it raises, an exit too, ends itself alone
            self._failure = error if isinstance(error, Exception) else RuntimeError(f"ended by {type(error).__name__}")
