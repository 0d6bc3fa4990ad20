"""How busy a source is and how long it takes: counters since the start, latencies of the last calls."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager

import anyio

REMEMBERED = 256
"""Calls that mean and percentile are taken over."""


class CallStats:
    """One source's numbers. Times are of the pipeline's clock."""

    def __init__(self) -> None:
        self.waiting = 0
        """Calls that wait for their turn now."""
        self.running = 0
        self._waiting_max = 0
        self._counts: Counter[str] = Counter(calls=0, failed=0, timeouts=0)
        self._latency_s: deque[float] = deque(maxlen=REMEMBERED)
        self._waited_s: deque[float] = deque(maxlen=REMEMBERED)

    @contextmanager
    def queued(self) -> Iterator[None]:
        """A call waits for its turn."""
        since_s = anyio.current_time()
        self.waiting += 1
        self._waiting_max = max(self._waiting_max, self.waiting)
        try:
            yield
        finally:
            self.waiting -= 1
            self._waited_s.append(anyio.current_time() - since_s)

    @contextmanager
    def called(self) -> Iterator[None]:
        """A call is under way."""
        since_s = anyio.current_time()
        self.running += 1
        self._counts["calls"] += 1
        try:
            yield
        finally:
            self.running -= 1
            self._latency_s.append(anyio.current_time() - since_s)

    def failed(self, *, late: bool) -> None:
        """A call, or one of its answers, was no good."""
        self._counts["timeouts" if late else "failed"] += 1

    def values(self, name: str) -> dict[str, float]:
        """Under ``score/<name>_...``: queue and running are of now, queue_max and the counts since the start."""
        out = {f"{what}": float(count) for what, count in self._counts.items()}
        out |= {"queue": float(self.waiting), "running": float(self.running), "queue_max": float(self._waiting_max)}
        for what, seconds in (("latency", self._latency_s), ("wait", self._waited_s)):
            if seconds:
                out[f"{what}_mean_s"] = sum(seconds) / len(seconds)
                out[f"{what}_p95_s"] = percentile(seconds, 0.95)
        return {f"score/{name}_{what}": value for what, value in out.items()}


def percentile(values: deque[float] | list[float], part: float) -> float:
    """The smallest of ``values`` that at least ``part`` of them do not exceed (nearest rank)."""
    ranked = sorted(values)
    return ranked[max(0, -(-int(part * 1000) * len(ranked) // 1000) - 1)]
