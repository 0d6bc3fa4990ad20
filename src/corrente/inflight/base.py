"""What happens to a live generation when new weights land."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Literal, Protocol

FlipNow = Callable[[Literal["swap", "recompute"]], Awaitable[None]]


class Traffic(Protocol):
    """The pipeline's valve on the way to the engine.

    ``quiet_requests()``: on entry new requests are held back and live ones have finished; on exit the held ones start.
    ``quiet_groups()``: the same for groups: no group starts generating, and those that did have finished.
    """

    def quiet_requests(self) -> AbstractAsyncContextManager[None]: ...

    def quiet_groups(self) -> AbstractAsyncContextManager[None]: ...


class InflightPolicy(Protocol):
    """Contract: call ``flip`` exactly once, when live generations are in the state the policy promises."""

    async def land(self, traffic: Traffic, flip: FlipNow) -> None: ...
