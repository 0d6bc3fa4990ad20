"""Seven ways for weights to land. Each calls ``flip`` once, when live generations are where it promises them to be."""

from __future__ import annotations

from corrente.inflight.base import FlipNow, Traffic, Whole


class SwapPolicy:
    """At once; live sequences go on with the cache they have."""

    one_version: Whole | None = None

    async def land(self, traffic: Traffic, flip: FlipNow, *, version: int) -> None:
        await flip("swap")


class RecomputePolicy:
    """At once; the engine rebuilds the caches of live sequences under the new weights."""

    one_version: Whole | None = None

    async def land(self, traffic: Traffic, flip: FlipNow, *, version: int) -> None:
        await flip("recompute")


class ResumePolicy:
    """Live requests are ended, weights change, and they are sent again with what they had written: the engine needs no way to
    change weights under a live sequence, and an ordinary prefill rebuilds the cache."""

    one_version: Whole | None = None

    async def land(self, traffic: Traffic, flip: FlipNow, *, version: int) -> None:
        async with traffic.interrupted():
            await flip("swap")


class DrainPolicy:
    """Once live requests have finished. No sequence mixes versions, but those of an evaluation, which nothing waits for; the
    engine idles through the tail of the longest."""

    one_version: Whole | None = "request"

    async def land(self, traffic: Traffic, flip: FlipNow, *, version: int) -> None:
        async with traffic.quiet_requests():
            await flip("swap")


class BarrierPolicy:
    """Once every group that started has finished. No group mixes versions."""

    one_version: Whole | None = "group"

    async def land(self, traffic: Traffic, flip: FlipNow, *, version: int) -> None:
        async with traffic.quiet_groups():
            await flip("swap")


class CancelPolicy:
    """At once; then groups that have seen more than ``max_age`` versions land since their admission are given up as wholes.

    Only once the flip has succeeded: one that fails costs nobody anything.
    """

    one_version: Whole | None = None

    def __init__(self, *, max_age: int) -> None:
        self._max_age = max_age

    async def land(self, traffic: Traffic, flip: FlipNow, *, version: int) -> None:
        await flip("swap")
        traffic.give_up(before_version=version - self._max_age)


class OldWeightsPolicy:
    """At once; live sequences finish under the weights they began with, which the engine keeps for as long.

    The version after next waits for the longest of them, so held-out completions, which may be long and many, are no such
    sequences: they go on under the new weights.
    """

    one_version: Whole | None = "request"

    async def land(self, traffic: Traffic, flip: FlipNow, *, version: int) -> None:
        async with traffic.interrupted(held_out_alone=True):
            await flip("snapshot")
