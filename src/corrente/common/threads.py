"""Runs what others wrote, so that it cannot take the run with it: a blocking call beside the event loop, in a thread that can be
given up; a coroutine on it, whose exit is its failure.

Threads are daemons: one that never returns is left behind when its caller is cancelled, and does not keep the process from
ending. It keeps its place under the limit until it does return, so stuck calls cannot pile up without bound. Does not interrupt
a running call: Python cannot.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Generator
from typing import Any

import anyio
import anyio.from_thread
import anyio.lowlevel

from corrente.errors import RolloutError, root_cause


class DaemonThreads:
    """Awaitable calls in daemon threads, at most ``limit`` at once."""

    def __init__(self, *, limit: int) -> None:
        self._limit = limit
        self._limiter: anyio.CapacityLimiter | None = None

    async def __call__(self, call: Callable[[], Any]) -> Any:
        """Return what ``call`` returns, raise what it raises; cancelling leaves the thread to itself."""
        if self._limiter is None:
            self._limiter = anyio.CapacityLimiter(self._limit)  # belongs to an event loop, so it is made inside one
        limiter, place = self._limiter, object()
        await limiter.acquire_on_behalf_of(place)
        done = anyio.Event()
        results: list[Any] = []
        failures: list[BaseException] = []
        token = anyio.lowlevel.current_token()

        def finish() -> None:
            limiter.release_on_behalf_of(place)
            done.set()

        def work() -> None:
            try:
                results.append(call())
            except BaseException as error:  # carried over to the caller, who judges it
                failures.append(error)
            # The loop may have ended long before a call that was given up returns; then nobody is waiting.
            with contextlib.suppress(RuntimeError):
                anyio.from_thread.run_sync(finish, token=token)

        threading.Thread(target=work, daemon=True, name="corrente call").start()
        await done.wait()
        if failures:
            failure = failures[0]
            raise failure if isinstance(failure, Exception) else RolloutError(f"ended by {type(failure).__name__}")
        return results[0]


@contextlib.contextmanager
def guard_user_code() -> Generator[None]:
    """Around the code of users: what ends a process, or a task, is a RolloutError there. Being cancelled by us passes.

    Passed on, SystemExit would end the event loop, and a cancellation that no scope of ours asked for would silently cancel all
    that runs beside it.
    """
    try:
        yield
    except (SystemExit, BaseExceptionGroup, anyio.get_cancelled_exc_class()) as error:
        cause = root_cause(error)
        if isinstance(cause, KeyboardInterrupt) or anyio.current_effective_deadline() == -math.inf:
            raise
        raise cause if isinstance(cause, Exception) else RolloutError(f"ended by {type(cause).__name__}") from error


async def inline(call: Callable[[], Any]) -> Any:
    """Call here and now: for simulations, whose time stands still while a thread works."""
    return call()
