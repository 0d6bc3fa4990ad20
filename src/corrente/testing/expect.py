"""How a suite fails: with the clause of the contract that was broken."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio


class ContractError(AssertionError):
    """An implementation breaks its Protocol's contract; the message begins with the clause."""


_UNSAID = object()


def expect(holds: bool, clause: str, seen: object = _UNSAID) -> None:
    """Raise ContractError naming ``clause``, and what was seen instead, unless it holds."""
    if not holds:
        raise ContractError(clause if seen is _UNSAID else f"{clause} (seen: {seen})")


async def expect_raises(kind: type[Exception], clause: str, call: Callable[[], Awaitable[Any]]) -> None:
    """``call()`` must raise ``kind``."""
    try:
        result = await call()
    except kind:
        return
    except Exception as error:
        raise ContractError(f"{clause} (seen: {type(error).__name__}: {error})") from error
    raise ContractError(f"{clause} (seen: it returned {result!r})")


class Pending:
    """A call on its way: ``result`` once ``done``; ``cancel`` it at any moment."""

    def __init__(self, call: Callable[[], Awaitable[Any]]) -> None:
        self._call = call
        self.scope = anyio.CancelScope()
        self.finished = anyio.Event()
        self.result: Any = None
        self.error: Exception | None = None
        self.done = False

    async def run(self) -> None:
        with self.scope:
            try:
                self.result = await self._call()
            except Exception as error:
                self.error = error
            self.done = True
        self.finished.set()

    async def cancel(self) -> None:
        """Cancel the call and wait until it is gone; it may have finished just before, which ``done`` then says."""
        self.scope.cancel()
        await self.finished.wait()


@asynccontextmanager
async def pending(call: Callable[[], Awaitable[Any]]) -> AsyncGenerator[Pending]:
    """Start ``call()`` in the background, run until nothing can move, and cancel it at the end of the block."""
    task = Pending(call)
    failure: Exception | None = None
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(task.run)
        try:
            await anyio.wait_all_tasks_blocked()
            yield task
        except Exception as error:
            failure = error
        tasks.cancel_scope.cancel()
    if failure is not None:
        raise failure
