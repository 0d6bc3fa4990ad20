"""The embedded engine as an ``Engine`` and a ``Receiver``: its steps are one task of the event loop, which gives way to others
after each.

No threads: while a step computes, the loop waits. Calls are numbered, and the core knows a request by its number, so that an id
may be used again as soon as its call was cancelled.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence

import anyio
import anyio.lowlevel
import msgspec

from corrente.data.types import ApplyMode, Completion, Request, Scores, Tokens
from corrente.engine.base import EngineStats
from corrente.engine.embedded.core import EmbeddedCore, Outcome
from corrente.errors import GenerationError, SyncError
from corrente.sync.base import Update
from corrente.sync.kinds import transport_of_offer
from corrente.sync.offers import Offer

Fetch = Callable[[Offer], Awaitable[None]]
"""Bring what is offered into its slot; see Receiver.receive."""


class _Call:
    """A generate call that waits for its outcome."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.over = anyio.Event()
        self.outcome: Outcome | None = None


async def nothing_to_fetch(offer: Offer) -> None:
    """Take offers whose bytes are in the slot already."""
    await anyio.lowlevel.checkpoint()
    if not transport_of_offer(offer).shares_memory:
        raise SyncError(
            f"version {offer.version} is offered as {type(offer).__name__}; this engine takes what is in its slots already"
        )


class EmbeddedEngine:
    """See Engine and Receiver. Whoever starts it runs ``run`` as a task; without it no call returns. ``fetch`` knows the
    transports that write into the core's buffers."""

    def __init__(self, core: EmbeddedCore, *, fetch: Fetch = nothing_to_fetch) -> None:
        self.core = core
        self._fetch = fetch
        self._calls: dict[str, _Call] = {}
        self._numbers = 0
        self._work = anyio.Event()
        self._moved = anyio.Event()

    async def run(self, *, rest: Callable[[], Awaitable[None]] = anyio.lowlevel.checkpoint) -> None:
        """Step while there is work, and ``rest`` after each; wait while there is none. Never returns. An error of the core is
        an error of this task."""
        while True:
            if self.core.idle:
                self._work = anyio.Event()
                await self._work.wait()
            for number, outcome in self.core.step():
                call = self._calls.pop(number, None)
                if call is not None:
                    call.outcome = outcome
                    call.over.set()
            self._look()
            await rest()

    def _look(self) -> None:
        """Sequences may have ended: let those that wait for a slot look again."""
        self._moved.set()
        self._moved = anyio.Event()

    async def generate(self, request: Request) -> Completion:
        await anyio.lowlevel.checkpoint()
        self._numbers += 1
        number = str(self._numbers)
        self.core.submit(msgspec.structs.replace(request, id=number))
        call = self._calls[number] = _Call(request.id)
        self._work.set()
        try:
            await call.over.wait()
        finally:
            if self._calls.pop(number, None) is not None:
                self.core.abort([number])
                self._look()
        assert call.outcome is not None
        if isinstance(call.outcome, GenerationError):
            raise call.outcome
        return call.outcome

    async def score(self, tokens: Tokens, *, top: int = 0) -> Scores:
        await anyio.lowlevel.checkpoint()
        return self.core.score(tokens, top)

    async def abort(self, ids: Sequence[str]) -> None:
        self.core.abort(list(self._named(ids)))
        self._work.set()
        self._look()
        await anyio.lowlevel.checkpoint()

    async def partials(self, ids: Sequence[str]) -> Mapping[str, Completion]:
        await anyio.lowlevel.checkpoint()
        named = self._named(ids)
        return {named[number]: partial for number, partial in self.core.partials(list(named)).items()}

    def _named(self, ids: Sequence[str]) -> dict[str, str]:
        """The calls in flight for requests among ``ids``: number -> id."""
        wanted = set(ids)
        return {number: call.request_id for number, call in self._calls.items() if call.request_id in wanted}

    async def reserve(self, slot: int) -> None:
        await anyio.lowlevel.checkpoint()
        while self._taken(slot):
            await self._moved.wait()

    async def receive(self, offer: Offer) -> None:
        held = self.core.stats().version
        if offer.base is not None and offer.base != held:
            raise SyncError(f"version {offer.version} changes version {offer.base}, but the engine holds {held}")
        if not transport_of_offer(offer).shares_memory and self._taken(offer.slot):
            raise SyncError(f"version {offer.version} is offered for slot {offer.slot}, which sequences sample from")
        await self._fetch(offer)

    def _taken(self, slot: int) -> bool:
        """True while live sequences sample from ``slot``; SyncError when the next request would. An only slot is free at once:
        the core samples nothing until it is given other weights."""
        if len(self.core.buffers) == 1:
            self.core.pause()
            return False
        held = self.core.held
        if held is not None and held.slot == slot:
            raise SyncError(f"slot {slot} holds version {held.version}, the newest: write to the other one")
        return not self.core.vacant(slot)

    async def held(self) -> int | None:
        version = (await self.stats()).version
        return None if version < 0 else version

    def members(self) -> int:
        return 1

    async def apply(self, update: Update, mode: ApplyMode) -> float:
        await anyio.lowlevel.checkpoint()
        start_s = time.perf_counter()
        self.core.apply(update, mode)
        self._look()
        return time.perf_counter() - start_s

    async def stats(self) -> EngineStats:
        await anyio.lowlevel.checkpoint()
        return self.core.stats()
