"""Instances of an environment: made when they are needed, used again, never by two episodes at once, and always closed.

An instance is *in play* from ``acquire`` to ``end_episode``. Reward functions that look at it hold it until ``release``, and
their number is not bounded: an episode's rewards may have to wait until the other episodes of its group have been played. Else
it is released at once, and there are never more than may be in play. An instance whose episode failed is closed and not used
again, for its state is unknown.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress

import anyio

from corrente.common.events import LogEvent, ignore_event
from corrente.env.instance import EnvInstance

Make = Callable[[], Awaitable[EnvInstance]]


class InstancePool:
    """Idle instances for reuse. ``limit``: instances in play; 0: any number. ``log_event`` reports errors of closing."""

    def __init__(self, make: Make, *, limit: int = 0, log_event: LogEvent = ignore_event) -> None:
        self._make, self._limit, self._log_event = make, limit, log_event
        self._idle: list[EnvInstance] = []
        self._slots: anyio.CapacityLimiter | None = None
        self.made = self.closed = 0

    async def acquire(self) -> EnvInstance:
        """Take an idle instance, or make one; wait where ``limit`` are in play."""
        slot = object()
        await self._take_slot(slot)
        try:
            instance = self._idle.pop() if self._idle else await self._make_instance()
        except BaseException:
            self._free_slot(slot)
            raise
        instance.pool_slot = slot
        return instance

    def end_episode(self, instance: EnvInstance) -> None:
        """End the instance's time in play; reward functions may still look at it."""
        self._free_slot(instance.pool_slot)

    async def release(self, instance: EnvInstance) -> None:
        """Make an instance that nobody needs any more available again."""
        if self._limit and len(self._idle) >= self._limit:
            await self._close_instance(instance)
        else:
            self._idle.append(instance)

    async def discard(self, instance: EnvInstance) -> None:
        """Close an instance whose episode failed or was given up. It keeps its slot until it is closed."""
        await self._close_instance(instance)
        self._free_slot(instance.pool_slot)

    async def close(self) -> None:
        """Close all idle instances, concurrently."""
        idle, self._idle = self._idle, []
        with anyio.CancelScope(shield=True):
            async with anyio.create_task_group() as tasks:
                for instance in idle:
                    tasks.start_soon(self._close_instance, instance)

    async def _make_instance(self) -> EnvInstance:
        instance = await self._make()
        self.made += 1
        return instance

    async def _close_instance(self, instance: EnvInstance) -> None:
        """Close an instance within its deadline, also while the caller is cancelled."""
        with anyio.CancelScope(shield=True):
            try:
                await instance.close()
            except Exception as error:  # anybody's code; the instance is gone either way
                self._log_event("warning", f"{instance.name} could not be closed: {type(error).__name__}: {error}")
        self.closed += 1

    async def _take_slot(self, slot: object) -> None:
        if not self._limit:
            return
        if self._slots is None:
            self._slots = anyio.CapacityLimiter(self._limit)  # belongs to an event loop, so it is made inside one
        await self._slots.acquire_on_behalf_of(slot)

    def _free_slot(self, slot: object) -> None:
        if self._slots is not None:
            with suppress(RuntimeError):  # it has left already
                self._slots.release_on_behalf_of(slot)
