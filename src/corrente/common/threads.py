"""Run user code so that it cannot end the run: blocking calls in daemon threads, and a guard around coroutines.

A thread that never returns is abandoned when its caller is cancelled, and does not keep the process from ending. It counts
against the limit until it returns, so stuck calls cannot pile up without bound. A running call is not interrupted: Python cannot
do that.
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
    """Runs calls in daemon threads, at most ``limit`` at once."""

    def __init__(self, *, limit: int) -> None:
        self._limit = limit
        self._limiter: anyio.CapacityLimiter | None = None

    async def __call__(self, call: Callable[[], Any]) -> Any:
        """Return what ``call`` returns and raise what it raises; cancelling abandons the thread."""
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
    """Turn exceptions of user code that would end a process or a task into RolloutError; our own cancellation passes.

    Passed on, SystemExit would end the event loop, and a cancellation that no scope of ours asked for would silently cancel
    every other task of the group.
    """
    try:
        yield
    except (SystemExit, BaseExceptionGroup, anyio.get_cancelled_exc_class()) as error:
        cause = root_cause(error)
        if isinstance(cause, KeyboardInterrupt) or anyio.current_effective_deadline() == -math.inf:
            raise
        raise cause if isinstance(cause, Exception) else RolloutError(f"ended by {type(cause).__name__}") from error


async def call_inline(call: Callable[[], Any]) -> Any:
    """Call in this thread at once: for simulations, whose virtual time does not pass while a thread works."""
    return call()
