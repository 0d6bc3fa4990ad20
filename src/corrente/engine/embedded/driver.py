"""The embedded engine as an ``Engine``: its steps are one task of the event loop, which gives way to others after each.

No threads: while a step computes, the loop waits. Calls are numbered, and the core knows a request by its number, so that an id
may be used again as soon as its call was cancelled.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence

import anyio
import anyio.lowlevel
import msgspec

from corrente.engine.base import ApplyMode, EngineStats
from corrente.engine.embedded.core import EngineCore, Outcome
from corrente.errors import GenerationError
from corrente.sync.base import Update
from corrente.types import Completion, Floats, Request, Tokens


class _Call:
    """A generate call that waits for its outcome."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.over = anyio.Event()
        self.outcome: Outcome | None = None


class EmbeddedEngine:
    """See Engine. Whoever starts it runs ``run`` as a task; without it no call returns."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self._calls: dict[str, _Call] = {}
        self._numbers = 0
        self._work = anyio.Event()

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
            await rest()

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
        assert call.outcome is not None
        if isinstance(call.outcome, GenerationError):
            raise call.outcome
        return call.outcome

    async def score(self, tokens: Tokens) -> Floats:
        await anyio.lowlevel.checkpoint()
        return self.core.score(tokens)

    async def abort(self, ids: Sequence[str]) -> None:
        named = set(ids)
        self.core.abort([number for number, call in self._calls.items() if call.request_id in named])
        self._work.set()
        await anyio.lowlevel.checkpoint()

    async def apply(self, update: Update, mode: ApplyMode) -> float:
        await anyio.lowlevel.checkpoint()
        start_s = time.perf_counter()
        self.core.apply(update, mode)
        return time.perf_counter() - start_s

    async def stats(self) -> EngineStats:
        await anyio.lowlevel.checkpoint()
        return self.core.stats()
