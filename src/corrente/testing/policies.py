"""The contracts of every InflightPolicy and every StalenessPolicy."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import Literal, get_args

import anyio

from corrente.data.types import ApplyMode
from corrente.errors import SyncError
from corrente.inflight.base import InflightPolicy, Whole
from corrente.staleness.base import StalenessPolicy
from corrente.testing import samples
from corrente.testing.expect import expect, expect_raises, pending

Promise = Literal["", "requests", "groups", "interrupted"]
"""What has happened when a policy flips: nothing, requests or groups have finished, or requests were interrupted."""
MODES: frozenset[str] = frozenset(get_args(ApplyMode))


class RecordingTraffic:
    """A request gate over imaginary requests and groups: quiet, or interrupted, once ``settle`` was called. It records who held
    it, and which groups were given up."""

    def __init__(self, *, settled: bool) -> None:
        self._settled = anyio.Event()
        self.held: set[str] = set()
        self.gave_up: list[int] = []
        if settled:
            self._settled.set()

    def settle(self) -> None:
        self._settled.set()

    def quiet_requests(self) -> AbstractAsyncContextManager[None]:
        return self._quiet("requests")

    def quiet_groups(self) -> AbstractAsyncContextManager[None]:
        return self._quiet("groups")

    def interrupted(self, *, held_out_alone: bool = False) -> AbstractAsyncContextManager[None]:
        return nullcontext() if held_out_alone else self._quiet("interrupted")  # there is no evaluation here

    def give_up(self, *, before_version: int) -> None:
        self.gave_up.append(before_version)

    @asynccontextmanager
    async def _quiet(self, what: str) -> AsyncGenerator[None]:
        self.held.add(what)
        try:
            await self._settled.wait()
            yield
        finally:
            self.held.remove(what)


async def check_inflight(
    make: Callable[[], InflightPolicy],
    *,
    waits_for: Promise = "",
    mode: ApplyMode | None = None,
    gives_up_before: int | None = None,
) -> None:
    """Hold ``make()`` to the contract of inflight/base.py, as version 7 lands. ``waits_for``: what must have happened when it
    flips. ``mode``: how it flips; None: in any way. ``gives_up_before``: groups older than this version are given up, once the
    flip has succeeded; None: none are."""
    await _flips_once(make(), waits_for, mode, gives_up_before)
    await _waits_for_what_it_promises(make(), waits_for)
    await _a_failed_flip_opens_the_gate(make())
    await _a_cancelled_landing_opens_the_gate(make())


async def _flips_once(
    policy: InflightPolicy, waits_for: Promise, mode: ApplyMode | None, gives_up_before: int | None
) -> None:
    traffic, flips = RecordingTraffic(settled=True), list[tuple[ApplyMode, set[str], list[int]]]()

    async def flip(how: ApplyMode) -> None:
        flips.append((how, set(traffic.held), list(traffic.gave_up)))
        await anyio.lowlevel.checkpoint()

    await policy.land(traffic, flip, version=7)
    expect(len(flips) == 1, "land calls flip exactly once", len(flips))
    how, held, gave_up = flips[0]
    expect(how in MODES, f"with a mode of {sorted(MODES)}", how)
    expect(mode is None or how == mode, f"in the mode it promises, {mode}", how)
    expect(not waits_for or waits_for in held, f"new {waits_for} are held back during the flip", held)
    promises = policy.one_version
    expect(
        promises in {None, *get_args(Whole)}, "what it keeps of one version is a request, a group or nothing", promises
    )
    finished = {"groups"} & held if promises == "group" else {"groups", "requests"} & held or how == "snapshot"
    expect(promises is None or bool(finished), f"each {promises} that is live has finished, to be of one version", held)
    expect(not traffic.held, "once land returned nothing is held back", traffic.held)
    expect(not gave_up, "nothing is given up before the flip has succeeded", gave_up)
    wanted = [] if gives_up_before is None else [gives_up_before]
    expect(traffic.gave_up == wanted, "groups past the bound are given up, and no others", traffic.gave_up)


async def _waits_for_what_it_promises(policy: InflightPolicy, waits_for: Promise) -> None:
    traffic, flips = RecordingTraffic(settled=False), list[ApplyMode]()

    async def flip(mode: ApplyMode) -> None:
        flips.append(mode)

    async with pending(lambda: policy.land(traffic, flip, version=7)):
        if waits_for:
            expect(not flips, f"flip waits until live {waits_for} have finished")
            traffic.settle()
            await anyio.wait_all_tasks_blocked()
        expect(len(flips) == 1, "flip is called as soon as its condition holds", len(flips))


async def _a_failed_flip_opens_the_gate(policy: InflightPolicy) -> None:
    traffic = RecordingTraffic(settled=True)

    async def flip(mode: ApplyMode) -> None:
        raise SyncError("no")

    clause = "a flip that fails fails the landing"
    await expect_raises(SyncError, clause, lambda: policy.land(traffic, flip, version=7))
    expect(not traffic.held, "and holds nothing back any longer", traffic.held)
    expect(not traffic.gave_up, "and gives nothing up", traffic.gave_up)


async def _a_cancelled_landing_opens_the_gate(policy: InflightPolicy) -> None:
    traffic = RecordingTraffic(settled=False)

    async def flip(mode: ApplyMode) -> None:
        await anyio.sleep_forever()

    async with pending(lambda: policy.land(traffic, flip, version=7)) as call:
        await call.cancel()
    expect(not traffic.held, "a landing that was cancelled holds nothing back", traffic.held)


def check_staleness(make: Callable[[], StalenessPolicy]) -> None:
    """Hold ``make()`` to the contract of staleness/base.py on groups of several ages, mixed ones and empty ones."""
    policy = make()
    groups = [
        samples.group(id=0, versions=(0, 0)),
        samples.group(id=1, versions=(0, 0, 1, 2)),
        samples.group(id=2, versions=(3, 3), admitted_version=3),
        samples.group(id=3, versions=(), admitted_version=2),
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
        fresh = policy.judge(samples.group(id=4, versions=versions, admitted_version=5), 5)
        expect(not fresh.stale, "a group of the present version is not stale, not even one without tokens", fresh)
