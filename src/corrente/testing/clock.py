"""Run an async function under a virtual clock: waiting costs nothing, and a seed decides everything.

The clock jumps to the next deadline whenever no task can run, so a ten-minute timeout is tested in milliseconds and a
deadlock ends at ``limit_s`` as a TimeoutError and not as a test that hangs. Threads are not simulated: the clock does not
wait for them.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar, TypeVarTuple

import anyio
import trio.testing

Args = TypeVarTuple("Args")
Result = TypeVar("Result")


@contextmanager
def _deterministic(seed: int) -> Iterator[None]:
    """Make trio's order of runnable tasks a function of ``seed``.

    trio shuffles them with a private generator, on purpose and without a public switch; its own Hypothesis plugin sets the
    same two names. Different seeds therefore explore different schedules.
    """
    from trio._core import _run as trio_run

    shuffler: random.Random = trio_run._r  # pyright: ignore[reportPrivateUsage]
    state = shuffler.getstate()
    allowed: bool = trio_run._ALLOW_DETERMINISTIC_SCHEDULING  # pyright: ignore[reportPrivateUsage]
    setattr(trio_run, "_ALLOW_DETERMINISTIC_SCHEDULING", True)  # noqa: B010 (declared Final)
    shuffler.seed(seed)
    try:
        yield
    finally:
        shuffler.setstate(state)
        setattr(trio_run, "_ALLOW_DETERMINISTIC_SCHEDULING", allowed)  # noqa: B010


def run_virtual(fn: Callable[[*Args], Awaitable[Result]], *args: *Args, seed: int = 0, limit_s: float = 1e7) -> Result:
    """Run ``fn(*args)`` to its end in virtual time, starting at 0, and return its result.

    ``seed`` picks the order in which runnable tasks run: equal seeds, equal runs. TimeoutError when ``fn`` has not ended
    after ``limit_s`` virtual seconds, which is where a run in which nobody can move arrives at once.
    """

    async def main() -> Result:
        with anyio.fail_after(limit_s):
            return await fn(*args)

    with _deterministic(seed):
        return anyio.run(main, backend="trio", backend_options={"clock": trio.testing.MockClock(autojump_threshold=0)})
