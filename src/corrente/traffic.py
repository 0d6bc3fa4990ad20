"""The valve between the pipeline and the engine: counts what is live, and can hold back what is new."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from corrente.waiting import Bell


class _Lane:
    """Entries wait while anyone holds the lane; a holder waits until it is empty. Cancelling either leaves no trace."""

    def __init__(self) -> None:
        self._bell = Bell()
        self._holders = 0
        self.live = 0

    @asynccontextmanager
    async def enter(self) -> AsyncGenerator[None]:
        await self._bell.until(lambda: self._holders == 0)
        self.live += 1
        try:
            yield
        finally:
            self.live -= 1
            self._bell.ring()

    @asynccontextmanager
    async def quiet(self) -> AsyncGenerator[None]:
        self._holders += 1
        try:
            await self._bell.until(lambda: self.live == 0)
            yield
        finally:
            self._holders -= 1
            self._bell.ring()


class Valve:
    """Implements inflight.base.Traffic for the pipeline."""

    def __init__(self) -> None:
        self.requests = _Lane()
        self.groups = _Lane()

    def quiet_requests(self) -> AbstractAsyncContextManager[None]:
        return self.requests.quiet()

    def quiet_groups(self) -> AbstractAsyncContextManager[None]:
        return self.groups.quiet()
