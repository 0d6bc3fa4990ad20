"""Load and latency of a source: counters since the start, latencies of the last calls."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager

import anyio

REMEMBERED = 256
"""Calls that mean and percentile are taken over."""


class CallStats:
    """Counters and latencies of one source, in seconds of the pipeline's clock."""

    def __init__(self) -> None:
        self.waiting = 0
        """Calls that wait for their turn now."""
        self.running = 0
        self._waiting_max = 0
        self._counts: Counter[str] = Counter(calls=0, failed=0, timeouts=0)
        self._latency_s: deque[float] = deque(maxlen=REMEMBERED)
        self._waited_s: deque[float] = deque(maxlen=REMEMBERED)

    @contextmanager
    def count_waiting(self) -> Iterator[None]:
        """Count a call as waiting while the block runs."""
        since_s = anyio.current_time()
        self.waiting += 1
        self._waiting_max = max(self._waiting_max, self.waiting)
        try:
            yield
        finally:
            self.waiting -= 1
            self._waited_s.append(anyio.current_time() - since_s)

    @contextmanager
    def count_running(self) -> Iterator[None]:
        """Count a call as running while the block runs."""
        since_s = anyio.current_time()
        self.running += 1
        self._counts["calls"] += 1
        try:
            yield
        finally:
            self.running -= 1
            self._latency_s.append(anyio.current_time() - since_s)

    def count_failure(self, *, late: bool) -> None:
        """Count a call that failed, or that gave a wrong answer."""
        self._counts["timeouts" if late else "failed"] += 1

    def metrics(self, name: str) -> dict[str, float]:
        """Metrics ``score/<name>_...``: queue and running are current, queue_max and the counts are since the start."""
        out = {f"{key}": float(count) for key, count in self._counts.items()}
        out |= {"queue": float(self.waiting), "running": float(self.running), "queue_max": float(self._waiting_max)}
        for key, seconds in (("latency", self._latency_s), ("wait", self._waited_s)):
            if seconds:
                out[f"{key}_mean_s"] = sum(seconds) / len(seconds)
                out[f"{key}_p95_s"] = percentile(seconds, 0.95)
        return {f"score/{name}_{key}": value for key, value in out.items()}


def percentile(values: deque[float] | list[float], share: float) -> float:
    """The smallest of ``values`` that at least ``share`` of them do not exceed (nearest rank)."""
    ranked = sorted(values)
    return ranked[max(0, -(-int(share * 1000) * len(ranked) // 1000) - 1)]
