"""The gate between the pipeline and the engine: it knows what is live, holds back what is new, interrupts, and gives up."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import anyio

from corrente.common.waiting import Condition
from corrente.errors import RolloutError, SyncError

ASK_AGAIN_S = 0.5
"""A request may be on its way to the engine when the engine is first asked to end it; so it is asked again."""
PATIENCE_S = 5.0
"""How long an interruption waits for requests that do not end. The engine does not know of them, or is stuck: no reason to hold
back a version, and neither has a cache that the new weights would spoil."""


@dataclass(slots=True, eq=False)
class InFlight:
    """One request or group between entry and exit. ``interrupted``: the gate asked the engine to end it. ``given_up``: it was
    cancelled before it was done."""

    name: str
    version: int = 0
    interrupted: bool = False
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)

    @property
    def given_up(self) -> bool:
        return self.scope.cancelled_caught


class _Lane:
    """Entries wait while anyone holds the lane; a holder may wait until it is empty. Cancelling either leaves no trace."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._holders = 0
        self.passages: dict[int, InFlight] = {}
        self._serial = 0

    @property
    def live(self) -> int:
        return len(self.passages)

    @asynccontextmanager
    async def enter(self, passage: InFlight) -> AsyncGenerator[InFlight]:
        await self._changed.wait_for(lambda: self._holders == 0)
        self._serial += 1
        key = self._serial
        self.passages[key] = passage
        try:
            yield passage
        finally:
            del self.passages[key]
            self._changed.notify_all()

    @asynccontextmanager
    async def held(self) -> AsyncGenerator[None]:
        self._holders += 1
        try:
            yield
        finally:
            self._holders -= 1
            self._changed.notify_all()

    @asynccontextmanager
    async def quiet(self) -> AsyncGenerator[None]:
        async with self.held():
            await self.empty()
            yield

    async def empty(self) -> None:
        await self._changed.wait_for(lambda: not self.passages)


class RequestGate:
    """Implements inflight.base.Traffic for the pipeline. ``abort`` is the engine's."""

    def __init__(self, abort: Callable[[Sequence[str]], Awaitable[None]]) -> None:
        self._abort = abort
        self._requests = _Lane()
        self._held_out = _Lane()
        self._groups = _Lane()

    def request(self, id: str, *, held_out: bool = False) -> AbstractAsyncContextManager[InFlight]:
        """One call of the engine, from entry to answer. ``held_out``: it is one of an evaluation, which no flip waits for."""
        return (self._held_out if held_out else self._requests).enter(InFlight(id))

    @asynccontextmanager
    async def group(self, ticket: int, *, version: int) -> AsyncGenerator[InFlight]:
        """One group, admitted at ``version``, from its first request to its last answer. When it is given up the block is
        cancelled and left, and the passage says so."""
        async with self._groups.enter(InFlight(str(ticket), version)) as passage:
            with passage.scope:
                yield passage

    @property
    def live(self) -> tuple[int, int]:
        """Requests and groups inside."""
        return self._requests.live + self._held_out.live, self._groups.live

    # ---- Traffic --------------------------------------------------------------------------------------------------------------

    def quiet_requests(self) -> AbstractAsyncContextManager[None]:
        return self._requests.quiet()

    def quiet_groups(self) -> AbstractAsyncContextManager[None]:
        return self._groups.quiet()

    @asynccontextmanager
    async def interrupted(self, *, held_out_alone: bool = False) -> AsyncGenerator[None]:
        async with AsyncExitStack() as stack:
            lanes = (self._held_out,) if held_out_alone else (self._requests, self._held_out)
            for lane in lanes:
                await stack.enter_async_context(lane.held())
            with anyio.move_on_after(PATIENCE_S):
                while any(lane.live for lane in lanes):
                    await self._interrupt(lanes)
            yield

    async def _interrupt(self, lanes: Sequence[_Lane]) -> None:
        live = tuple(passage for lane in lanes for passage in lane.passages.values())
        for passage in live:
            passage.interrupted = True
        try:
            await self._abort([passage.name for passage in live])
        except RolloutError as error:
            raise SyncError(f"the engine could not be interrupted: {error}") from error
        with anyio.move_on_after(ASK_AGAIN_S):
            for lane in lanes:
                await lane.empty()

    def give_up(self, *, before_version: int) -> None:
        for passage in self._groups.passages.values():
            if passage.version < before_version:
                passage.scope.cancel()
