"""A coroutine function run to its end: here or, where an event loop runs already as in a notebook, in a thread. And Ctrl-C."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
from anyio.from_thread import start_blocking_portal


def run(work: Callable[[bool], Awaitable[Any]], *, stop: anyio.Event | None = None) -> Any:
    """What ``work`` returns. It is told whether signals are its own to handle, which they are in the main thread only.

    Beside an event loop, Ctrl-C (KeyboardInterrupt in the thread that called) sets ``stop``, and ``work`` may end as it will. The
    second, or one without ``stop``, cancels it and is raised once it has cleaned up.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        main = threading.current_thread() is threading.main_thread()
        return anyio.run(work, main)
    with start_blocking_portal() as portal:
        begin = anyio.Event()

        async def held() -> Any:
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
