"""The embedded engine as an ``Engine`` and a ``Receiver``: one task of the event loop runs the core's steps.

The task yields to others after each step. There are no threads: while a step computes, the event loop waits. Calls are numbered,
and the core knows a request by its number, so that an id may be used again as soon as its call was cancelled.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence

import anyio
import anyio.lowlevel
import msgspec

from corrente.data.types import ApplyMode, Completion, Request, Scores, Tokens
from corrente.engine.base import EngineStats
from corrente.engine.embedded.core import EmbeddedCore, RequestOutcome
from corrente.errors import GenerationError, SyncError
from corrente.sync.base import Update
from corrente.sync.kinds import transport_of_offer
from corrente.sync.offers import Offer

FetchOffer = Callable[[Offer], Awaitable[None]]
"""Fetches offered weights into their slot; see Receiver.receive."""


class _PendingCall:
    """A generate call that waits for its outcome."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.done = anyio.Event()
        self.outcome: RequestOutcome | None = None


async def accept_in_place(offer: Offer) -> None:
    """Accept offers whose bytes are in the slot already; SyncError for any other."""
    await anyio.lowlevel.checkpoint()
    if not transport_of_offer(offer).shares_memory:
        raise SyncError(
            f"version {offer.version} is offered as {type(offer).__name__}; this engine takes what is in its slots already"
        )


class EmbeddedEngine:
    """Implements Engine and Receiver over an ``EmbeddedCore``. Run ``run`` as a task: without it no call returns.

    ``fetch`` brings offered weights into the core's buffers.
    """

    def __init__(self, core: EmbeddedCore, *, fetch: FetchOffer = accept_in_place) -> None:
        self.core = core
        self._fetch = fetch
        self._calls: dict[str, _PendingCall] = {}
        self._call_count = 0
        self._work_arrived = anyio.Event()
        self._sequences_changed = anyio.Event()

    async def run(self, *, after_step: Callable[[], Awaitable[None]] = anyio.lowlevel.checkpoint) -> None:
        """Step while there is work, and wait while there is none; never returns. Errors of the core end this task.

        ``after_step`` is awaited after each step, so that other tasks run.
        """
        while True:
            if self.core.idle:
                self._work_arrived = anyio.Event()
                await self._work_arrived.wait()
            for number, outcome in self.core.step():
                call = self._calls.pop(number, None)
                if call is not None:
                    call.outcome = outcome
                    call.done.set()
            self._notify_slot_waiters()
            await after_step()

    def _notify_slot_waiters(self) -> None:
        """Wake the tasks that wait for a slot, because sequences may have ended."""
        self._sequences_changed.set()
        self._sequences_changed = anyio.Event()

    async def generate(self, request: Request) -> Completion:
        await anyio.lowlevel.checkpoint()
        self._call_count += 1
        number = str(self._call_count)
        self.core.submit(msgspec.structs.replace(request, id=number))
        call = self._calls[number] = _PendingCall(request.id)
        self._work_arrived.set()
        try:
            await call.done.wait()
        finally:
            if self._calls.pop(number, None) is not None:
                self.core.abort([number])
                self._notify_slot_waiters()
        assert call.outcome is not None
        if isinstance(call.outcome, GenerationError):
            raise call.outcome
        return call.outcome

    async def score(self, tokens: Tokens, *, top: int = 0) -> Scores:
        await anyio.lowlevel.checkpoint()
        return self.core.score(tokens, top)

    async def abort(self, ids: Sequence[str]) -> None:
        self.core.abort(list(self._calls_of(ids)))
        self._work_arrived.set()
        self._notify_slot_waiters()
        await anyio.lowlevel.checkpoint()

    async def partial_completions(self, ids: Sequence[str]) -> Mapping[str, Completion]:
        await anyio.lowlevel.checkpoint()
        named = self._calls_of(ids)
        return {named[number]: partial for number, partial in self.core.partial_completions(list(named)).items()}

    def _calls_of(self, ids: Sequence[str]) -> dict[str, str]:
        """The calls in progress for requests among ``ids``, as call number -> request id."""
        wanted = set(ids)
        return {number: call.request_id for number, call in self._calls.items() if call.request_id in wanted}

    async def reserve(self, slot: int) -> None:
        await anyio.lowlevel.checkpoint()
        while self._is_slot_in_use(slot):
            await self._sequences_changed.wait()

    async def receive(self, offer: Offer) -> None:
        held = self.core.stats().version
        if offer.base is not None and offer.base != held:
            raise SyncError(f"version {offer.version} changes version {offer.base}, but the engine holds {held}")
        if not transport_of_offer(offer).shares_memory and self._is_slot_in_use(offer.slot):
            raise SyncError(f"version {offer.version} is offered for slot {offer.slot}, which sequences sample from")
        await self._fetch(offer)

    def _is_slot_in_use(self, slot: int) -> bool:
        """True while live sequences sample from ``slot``; SyncError when the next request would. An only slot is free at once:
        the core samples nothing until it is given other weights."""
        if len(self.core.buffers) == 1:
            self.core.pause()
            return False
        newest = self.core.newest_update
        if newest is not None and newest.slot == slot:
            raise SyncError(f"slot {slot} holds version {newest.version}, the newest: write to the other one")
        return not self.core.is_slot_free(slot)

    async def held(self) -> int | None:
        version = (await self.stats()).version
        return None if version < 0 else version

    def members(self) -> int:
        return 1

    async def apply(self, update: Update, mode: ApplyMode) -> float:
        await anyio.lowlevel.checkpoint()
        start_s = time.perf_counter()
        self.core.apply(update, mode)
        self._work_arrived.set()  # an engine with one slot stood still until these weights
        self._notify_slot_waiters()
        return time.perf_counter() - start_s

    async def stats(self) -> EngineStats:
        await anyio.lowlevel.checkpoint()
        return self.core.stats()
