"""What every InflightPolicy and every StalenessPolicy must do."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Literal

import anyio

from corrente.errors import SyncError
from corrente.inflight.base import InflightPolicy
from corrente.staleness.base import StalenessPolicy
from corrente.testing.expect import expect, expect_raises, pending
from corrente.testing.samples import group


class RecordingTraffic:
    """A valve over imaginary requests and groups: quiet once ``settle`` was called; writes down who held it."""

    def __init__(self, *, settled: bool) -> None:
        self._settled = anyio.Event()
        self.log: list[str] = []
        self.held: set[str] = set()
        if settled:
            self._settled.set()

    def settle(self) -> None:
        self._settled.set()

    def quiet_requests(self):
        return self._quiet("requests")

    def quiet_groups(self):
        return self._quiet("groups")

    @asynccontextmanager
    async def _quiet(self, what: str) -> AsyncGenerator[None]:
        self.held.add(what)
        try:
            await self._settled.wait()
            yield
        finally:
            self.held.remove(what)


async def check_inflight(
    make: Callable[[], InflightPolicy], *, waits_for: Literal["requests", "groups", ""] = ""
) -> None:
    """Hold ``make()`` to the contract of inflight/base.py; ``waits_for`` is what must have finished when it flips."""
    await _flips_once(make(), waits_for)
    await _waits_for_what_it_promises(make(), waits_for)
    await _a_failed_flip_opens_the_valve(make())
    await _a_cancelled_landing_opens_the_valve(make())


async def _flips_once(policy: InflightPolicy, waits_for: str) -> None:
    traffic, flips = RecordingTraffic(settled=True), []

    async def flip(mode: Literal["swap", "recompute"]) -> None:
        flips.append((mode, set(traffic.held)))
        await anyio.lowlevel.checkpoint()

    await policy.land(traffic, flip)
    expect(len(flips) == 1, "land calls flip exactly once", len(flips))
    expect(flips[0][0] in ("swap", "recompute"), 'with a mode of "swap" or "recompute"', flips[0][0])
    expect(not waits_for or waits_for in flips[0][1], f"new {waits_for} are held back during the flip", flips[0][1])
    expect(not traffic.held, "once land returned nothing is held back", traffic.held)


async def _waits_for_what_it_promises(policy: InflightPolicy, waits_for: str) -> None:
    traffic, flips = RecordingTraffic(settled=False), []

    async def flip(mode: Literal["swap", "recompute"]) -> None:
        flips.append(mode)

    async with pending(lambda: policy.land(traffic, flip)):
        if waits_for:
            expect(not flips, f"flip waits until live {waits_for} have finished")
            traffic.settle()
            await anyio.wait_all_tasks_blocked()
        expect(len(flips) == 1, "flip is called as soon as its condition holds", len(flips))


async def _a_failed_flip_opens_the_valve(policy: InflightPolicy) -> None:
    traffic = RecordingTraffic(settled=True)

    async def flip(mode: Literal["swap", "recompute"]) -> None:
        raise SyncError("no")

    await expect_raises(SyncError, "a flip that fails fails the landing", lambda: policy.land(traffic, flip))
    expect(not traffic.held, "and holds nothing back any longer", traffic.held)


async def _a_cancelled_landing_opens_the_valve(policy: InflightPolicy) -> None:
    traffic = RecordingTraffic(settled=False)

    async def flip(mode: Literal["swap", "recompute"]) -> None:
        await anyio.sleep_forever()

    async with pending(lambda: policy.land(traffic, flip)) as call:
        await call.cancel()
    expect(not traffic.held, "a landing that was cancelled holds nothing back", traffic.held)


def check_staleness(make: Callable[[], StalenessPolicy]) -> None:
    """Hold ``make()`` to the contract of staleness/base.py on groups of several ages, mixed ones and empty ones."""
    policy = make()
    groups = [
        group(0, versions=(0, 0)),
        group(1, versions=(0, 0, 1, 2)),
        group(2, versions=(3, 3), admitted_version=3),
        group(3, versions=(), admitted_version=2),
    ]
    for subject in groups:
        verdicts = [policy.judge(subject, version) for version in range(3, 12)]
        again = [make().judge(subject, version) for version in range(3, 12)]
        expect(verdicts == again, "judge depends on the group and the version alone", (verdicts, again))
        stale = [bool(v.stale) for v in verdicts]
        expect(stale == sorted(stale), "a group that is stale stays stale", stale)
        for version, verdict in enumerate(verdicts, start=3):
            oldest = verdict.oldest_trainable
            expect(oldest is None or oldest <= version, "tokens of the present version may be trained on", verdict)
    for versions in ((5, 5), ()):
        fresh = policy.judge(group(4, versions=versions, admitted_version=5), 5)
        expect(not fresh.stale, "a group of the present version is not stale, not even one without tokens", fresh)
