"""Runs a coroutine function to its end from code that is not async: here, or in a thread where an event loop runs already."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio
from anyio.from_thread import start_blocking_portal

T = TypeVar("T")


def run_blocking(work: Callable[[bool], Awaitable[T]], *, stop: anyio.Event | None = None) -> T:
    """Return the result of ``work``, whose argument is True when signals are its own to handle: in the main thread only.

    Where an event loop runs already, as in a notebook, ``work`` has a thread of its own. Ctrl-C (KeyboardInterrupt in the calling
    thread) then sets ``stop``, and ``work`` may end as it will. The second, or one without ``stop``, cancels ``work`` and is
    raised once it has cleaned up.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        main = threading.current_thread() is threading.main_thread()
        return anyio.run(work, main)
    with start_blocking_portal() as portal:
        begin = anyio.Event()

        async def held() -> T:
            await begin.wait()
            return await work(False)

        future = portal.start_task_soon(held)  # known before the work begins, so Ctrl-C finds it however early it comes
        try:
            portal.start_task_soon(begin.set)
            return future.result()
        except KeyboardInterrupt:
            if stop is None or future.done():
                raise
            for event in (begin, stop):
                portal.start_task_soon(event.set)
        return future.result()
