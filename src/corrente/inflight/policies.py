"""Four ways for weights to land. Each calls ``flip`` once, when live generations are where it promises them to be."""

from __future__ import annotations

from corrente.inflight.base import FlipNow, Traffic


class Swap:
    """At once; live sequences go on with the cache they have."""

    async def land(self, traffic: Traffic, flip: FlipNow) -> None:
        await flip("swap")


class Recompute:
    """At once; the engine rebuilds the caches of live sequences under the new weights."""

    async def land(self, traffic: Traffic, flip: FlipNow) -> None:
        await flip("recompute")


class Drain:
    """Once live requests have finished. No sequence mixes versions; the engine idles through the tail of the longest."""

    async def land(self, traffic: Traffic, flip: FlipNow) -> None:
        async with traffic.quiet_requests():
            await flip("swap")


class Barrier:
    """Once every group that started has finished. No group mixes versions."""

    async def land(self, traffic: Traffic, flip: FlipNow) -> None:
        async with traffic.quiet_groups():
            await flip("swap")
