"""Several virtual engines behind one: what happens to traffic when one of them comes late. Routing is by load alone."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

from corrente.common.waiting import Condition
from corrente.data.types import ApplyMode, Completion, Request, Scores, Tokens
from corrente.engine.base import EngineStats
from corrente.errors import SyncError
from corrente.sim.engine import VirtualEngine
from corrente.sync.base import Update
from corrente.sync.offers import Offer


class VirtualPool:
    """Several virtual engines behind one Engine and Receiver: a request goes to the least loaded one that holds the current
    version. An engine that was restarted gets no request until it has been brought up to date: by the next version, or by
    ``Sync.catch_up``.
    """

    def __init__(self, engines: Iterable[VirtualEngine]) -> None:
        self.engines = tuple(engines)
        self._version: int | None = None
        self._changed = Condition()

    def ready(self) -> list[VirtualEngine]:
        return [e for e in self.engines if e.version is not None and e.version == self._version]

    async def generate(self, request: Request) -> Completion:
        await self._changed.wait_for(lambda: bool(self.ready()))
        ready = self.ready()
        return await min(ready, key=lambda engine: engine.load).generate(request)

    async def score(self, tokens: Tokens, *, top: int = 0) -> Scores:
        await self._changed.wait_for(lambda: bool(self.ready()))
        return await self.ready()[0].score(tokens, top=top)

    async def abort(self, ids: Sequence[str]) -> None:
        for engine in self.engines:
            await engine.abort(ids)

    async def partial_completions(self, ids: Sequence[str]) -> Mapping[str, Completion]:
        found: dict[str, Completion] = {}
        for engine in self.engines:
            found |= await engine.partial_completions(ids)
        return found

    async def stats(self) -> EngineStats:
        every = [await engine.stats() for engine in self.engines]
        return EngineStats(
            version=-1 if self._version is None else self._version,
            running=sum(s.running for s in every),
            waiting=sum(s.waiting for s in every),
            prefill_tokens=sum(s.prefill_tokens for s in every),
            decode_tokens=sum(s.decode_tokens for s in every),
            busy_s=sum(s.busy_s for s in every),
        )

    async def reserve(self, slot: int) -> None:
        for engine in self.engines:
            await engine.reserve(slot)

    async def receive(self, offer: Offer) -> None:
        for engine in self.engines:
            await engine.receive(offer)

    async def apply(self, update: Update, mode: ApplyMode) -> float:
        """Apply an update on every engine that received it, or on none. One that was restarted since is left behind."""
        able = [engine for engine in self.engines if engine.has(update)]
        if not able:
            raise SyncError(f"version {update.version} was received by no engine")
        pauses = [await engine.prepare(update) for engine in able]
        for engine in able:
            if engine.has(update):
                engine.hold(update, mode)
        self._version = update.version
        self._changed.notify_all()
        return max(pauses)

    async def rejoin(self, engine: VirtualEngine, catch_up: Callable[[VirtualEngine], Awaitable[None]]) -> None:
        """Bring ``engine`` up to date, by ``Sync.catch_up``; it gets traffic when that has returned."""
        await catch_up(engine)
        self._changed.notify_all()

    async def held(self) -> int | None:
        return self._version

    def members(self) -> int:
        return len(self.engines)
