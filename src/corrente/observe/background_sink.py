"""Run a sink in a thread of its own, for sinks that import much, talk to the network, or may hang.

Calls go into a bounded queue and return at once. When the queue is full, a call is dropped and counted. An exception of the sink
is raised by the next call, so that ``Fanout`` reports it and drops the sink. A sink that hangs is abandoned: its thread is a
daemon, and ``close`` waits no longer than ``close_timeout_s``.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from typing import Any

from corrente.observe.base import Sink

MAX_QUEUED_CALLS = 1000
"""The number of calls that the queue holds."""
CLOSE_TIMEOUT_S = 30.0

Call = Callable[[Sink], None]


class BackgroundSink:
    """Implements Sink over a sink that ``make`` builds in the thread. ``name`` is for messages."""

    def __init__(
        self,
        make: Callable[[], Sink],
        *,
        name: str,
        max_queued: int = MAX_QUEUED_CALLS,
        close_timeout_s: float = CLOSE_TIMEOUT_S,
    ) -> None:
        self.name, self._close_timeout_s = name, close_timeout_s
        self._calls: queue.Queue[Call | None] = queue.Queue(max_queued)
        self._failure: Exception | None = None
        self._dropped = 0
        self._closed = False
        self._thread = threading.Thread(target=self._run_thread, args=(make,), name=f"tracker {name}", daemon=True)
        self._thread.start()

    def log_metrics(self, step: int, values: Mapping[str, float]) -> None:
        kept = dict(values)
        self._enqueue_call(lambda sink: sink.log_metrics(step, kept))

    def log_span(self, track: str, name: str, start_s: float, stop_s: float, attrs: Mapping[str, Any]) -> None:
        pass

    def log_sample(self, step: int, sample: Mapping[str, Any]) -> None:
        kept = dict(sample)
        self._enqueue_call(lambda sink: sink.log_sample(step, kept))

    def log_event(self, level: str, message: str) -> None:
        self._enqueue_call(lambda sink: sink.log_event(level, message))

    def close(self) -> None:
        """Wait for the queued calls, then close the sink; a second call does nothing.

        TimeoutError when it takes longer than ``close_timeout_s``; RuntimeError when calls were dropped.
        """
        if self._closed:
            return
        self._closed = True
        self._raise_failure()
        try:
            self._calls.put(None, timeout=self._close_timeout_s)
            self._thread.join(self._close_timeout_s)
        except queue.Full:
            pass
        if self._thread.is_alive():
            raise TimeoutError(f"{self.name} was not done within {self._close_timeout_s:g} s, and is left behind")
        self._raise_failure()
        if self._dropped:
            raise RuntimeError(f"{self.name} was too slow: {self._dropped} records are missing there")

    def _enqueue_call(self, call: Call) -> None:
        self._raise_failure()
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self._dropped += 1

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _run_thread(self, make: Callable[[], Sink]) -> None:
        try:
            sink = make()
            while (call := self._calls.get()) is not None:
                call(sink)
            sink.close()
        except (
            BaseException
        ) as error:  # third-party code: whatever it raises, SystemExit too, must end this thread only
            self._failure = error if isinstance(error, Exception) else RuntimeError(f"ended by {type(error).__name__}")
