"""Publishes the learner's weights as a live version: exported, delivered, flipped to, each with retries.

export    awaited by the learner: a copy of its weights, from which everything after proceeds
deliver   awaited by the publish task, beside the learner's next step
land      the inflight policy and the flip; the version advances by one, once, everywhere
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio

from corrente.controller.journal import Journal
from corrente.controller.parts import Parts
from corrente.controller.request_gate import RequestGate
from corrente.data.types import ApplyMode
from corrente.errors import SyncError
from corrente.sync.base import Update

T = TypeVar("T")


class Publisher:
    """Transfers weights and waits for what the inflight policy asks; knows nothing of slots or learners' steps."""

    def __init__(self, parts: Parts, *, request_gate: RequestGate, journal: Journal) -> None:
        self._sync = parts.sync
        self._inflight = parts.inflight
        self._request_gate = request_gate
        self._journal = journal
        self._retries = parts.plan.publish_retries

    async def publish(self, version: int) -> Update:
        """Make the learner's present weights the live ``version``, for a caller whose learner has nothing to do meanwhile."""
        await self.export(version)
        update = await self.deliver(version)
        await self.land(update)
        return update

    async def export(self, version: int) -> None:
        """Copy the learner's present weights, as ``version``; the learner may go on when this returns."""
        start_s = self._journal.elapsed_s
        await self._retrying(f"exporting version {version}", lambda: self._sync.export(version))
        self._journal.span("sync", f"export {version}", start_s)

    async def deliver(self, version: int) -> Update:
        """Bring the exported ``version`` to every engine. A retry delivers the same copy, however far the learner is."""
        start_s = self._journal.elapsed_s
        with self._journal.waits.register_wait("publish", "delivery"):
            update = await self._retrying(f"delivering version {version}", lambda: self._sync.deliver(version))
        self._journal.span("sync", f"deliver {version}", start_s, bytes=update.nbytes)
        return update

    async def land(self, update: Update) -> None:
        """Return when every engine samples from ``update``; live generations are treated as the policy says."""
        start_s = self._journal.elapsed_s
        flips = 0

        async def flip(mode: ApplyMode) -> None:
            nonlocal flips
            began_s = self._journal.elapsed_s
            report = await self._sync.flip(update, mode)
            flips += 1
            self._journal.span("engine", f"flip {update.version}", began_s, pause_ms=report.pause_s * 1e3, mode=mode)

        with self._journal.waits.register_wait("publish", "the inflight policy and the flip"):
            await self._retrying(
                f"publishing version {update.version}",
                lambda: self._inflight.land(self._request_gate, flip, version=update.version),
            )
        assert flips == 1, f"{type(self._inflight).__name__} flipped {flips} times"
        self._journal.span("sync", f"publish {update.version}", start_s)

    async def _retrying(self, what: str, attempt: Callable[[], Awaitable[T]]) -> T:
        """A transfer that failed left every engine on the old version: say why, and try again, a bounded number of times."""
        tries = 0
        while True:
            try:
                result = await attempt()
            except SyncError as error:
                tries += 1
                if tries > self._retries:
                    raise SyncError(f"{what} failed {tries} times; the last: {error}") from error
                self._journal.sink.log_event("warning", f"{what} failed, trying again: {error}")
                await anyio.sleep(0.1 * 2**tries)
            else:
                self._journal.moved()
                return result
