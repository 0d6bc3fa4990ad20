"""A condition to wait for, and a register of who waits for what, since when.

The control plane has no queue without a bound and no wait without a name. The watchdog reports ``WaitRegistry`` when nothing
moves, and the idle fractions come from it. Time is ``anyio.current_time()``, not the wall clock.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Generator
from contextlib import contextmanager

import anyio
import msgspec


class Condition:
    """A condition variable without a lock, for one thread: change the state, then call ``notify_all``."""

    def __init__(self) -> None:
        self._event = anyio.Event()

    def notify_all(self) -> None:
        """Wake every waiter to check its predicate again."""
        self._event.set()
        self._event = anyio.Event()

    async def wait_for(self, ready: Callable[[], bool]) -> None:
        """Return when ``ready()`` holds; it still holds on return. Safe to cancel."""
        while not ready():
            await self._event.wait()


class Wait(msgspec.Struct, frozen=True):
    """``who`` has been waiting for ``what`` since ``since_s``."""

    who: str
    what: str
    since_s: float


class WaitRegistry:
    """The register of waits: those in progress, and the seconds each has taken in all."""

    def __init__(self) -> None:
        self._live: dict[int, Wait] = {}
        self._serial = 0
        self._total_s: defaultdict[tuple[str, str], float] = defaultdict(float)

    @contextmanager
    def register_wait(self, who: str, what: str) -> Generator[None]:
        """Register a wait for the length of a ``with`` block."""
        self._serial += 1
        key = self._serial
        self._live[key] = Wait(who, what, anyio.current_time())
        try:
            yield
        finally:
            wait = self._live.pop(key)
            self._total_s[who, what] += anyio.current_time() - wait.since_s

    def total_s(self, who: str, what: str) -> float:
        """Seconds ``who`` has waited for ``what`` so far, a wait in progress included."""
        now = anyio.current_time()
        running = sum(now - w.since_s for w in self._live.values() if (w.who, w.what) == (who, what))
        return self._total_s[who, what] + running

    def describe(self, *, most: int = 8) -> str:
        """The present waits in one line, the longest first; at most ``most`` of them."""
        now = anyio.current_time()
        waits = sorted(self._live.values(), key=lambda wait: wait.since_s)
        lines = [f"{w.who} waits for {w.what} ({now - w.since_s:.1f} s)" for w in waits[:most]]
        more = [f"and {len(waits) - most} more"] if len(waits) > most else []
        return "; ".join(lines + more) or "no stage is waiting: a call into a worker does not return"
