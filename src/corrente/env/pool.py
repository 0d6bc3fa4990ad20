"""Instances of an environment: made when they are needed, used again, never by two episodes at once, and always closed.

An instance is *in play* from ``take`` to ``rest``. Where reward functions look at it, it is with them until ``give_back``, and
not bounded: an episode's rewards may have to wait until the other episodes of its group have been played. Else it is given back
at once, and there are never more than may be in play. An instance whose episode failed is closed and not used again: nobody knows
what it was doing.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress

import anyio

from corrente.env.instance import EnvInstance

Make = Callable[[], Awaitable[EnvInstance]]
Tell = Callable[[str, str], None]
"""Level and message of an event."""


class InstancePool:
    """``limit``: instances in play; 0: any number. ``tell`` hears of what goes wrong while one is closed."""

    def __init__(self, make: Make, *, limit: int = 0, tell: Tell = lambda level, message: None) -> None:
        self._make, self._limit, self._tell = make, limit, tell
        self._idle: list[EnvInstance] = []
        self._places: anyio.CapacityLimiter | None = None
        self.made = self.closed = 0

    async def take(self) -> EnvInstance:
        """An instance that nobody uses; waits for one where there may not be more."""
        place = object()
        await self._enter(place)
        try:
            stage = self._idle.pop() if self._idle else await self._new()
        except BaseException:
            self._leave(place)
            raise
        stage.place = place
        return stage

    def rest(self, stage: EnvInstance) -> None:
        """The episode is played; rewards may still look at the instance."""
        self._leave(stage.place)

    async def give_back(self, stage: EnvInstance) -> None:
        """Nobody needs it any more: it may be used again."""
        if self._limit and len(self._idle) >= self._limit:
            await self._close(stage)
        else:
            self._idle.append(stage)

    async def discard(self, stage: EnvInstance) -> None:
        """Its episode failed, or was given up. It keeps its place until it is closed."""
        await self._close(stage)
        self._leave(stage.place)

    async def close(self) -> None:
        """Close all that are idle, side by side."""
        idle, self._idle = self._idle, []
        with anyio.CancelScope(shield=True):
            async with anyio.create_task_group() as tasks:
                for stage in idle:
                    tasks.start_soon(self._close, stage)

    async def _new(self) -> EnvInstance:
        stage = await self._make()
        self.made += 1
        return stage

    async def _close(self, stage: EnvInstance) -> None:
        """Within its deadline, also while the caller is cancelled."""
        with anyio.CancelScope(shield=True):
            try:
                await stage.close()
            except Exception as error:  # anybody's code; the instance is gone either way
                self._tell("warning", f"{stage.name} could not be closed: {type(error).__name__}: {error}")
        self.closed += 1

    async def _enter(self, place: object) -> None:
        if not self._limit:
            return
        if self._places is None:
            self._places = anyio.CapacityLimiter(self._limit)  # belongs to an event loop, so it is made inside one
        await self._places.acquire_on_behalf_of(place)

    def _leave(self, place: object) -> None:
        if self._places is not None:
            with suppress(RuntimeError):  # it has left already
                self._places.release_on_behalf_of(place)
