"""The inflight policy's contract: it decides what happens to live generations when new weights land."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Literal, Protocol

from corrente.data.types import ApplyMode

FlipNow = Callable[[ApplyMode], Awaitable[None]]
Whole = Literal["request", "group"]
"""The unit that one version of the weights samples, from its first token to its last."""


class Traffic(Protocol):
    """The pipeline's gate on the way to the engine, as a policy uses it.

    - ``quiet_requests()``: on entry new requests are held back and live ones have finished; on exit the held ones start. Those of
      an evaluation are neither held back nor waited for.
    - ``quiet_groups()``: the same for groups: no group starts generating, and those that did have finished.
    - ``interrupted()``: on entry new requests are held back and the engine has ended the live ones; on exit the held ones start
      and the ended ones go on from where they were. A request that the engine cannot end, because it does not know of it yet,
      is waited for a few seconds and then left alone. ``held_out_alone``: only requests of an evaluation.
    - ``give_up(before_version=)``: groups that were admitted before that version was live, and still generate, are cancelled as
      wholes; each is accounted for and its slot comes free. Returns at once; a later call may follow.
    """

    def quiet_requests(self) -> AbstractAsyncContextManager[None]: ...

    def quiet_groups(self) -> AbstractAsyncContextManager[None]: ...

    def interrupted(self, *, held_out_alone: bool = False) -> AbstractAsyncContextManager[None]: ...

    def give_up(self, *, before_version: int) -> None: ...


class InflightPolicy(Protocol):
    """Contract: call ``flip`` exactly once, when live generations are in the state the policy promises. ``version`` is the one
    that lands. When ``flip`` raises, or the landing is cancelled, nothing is held back any longer. ``one_version``: what never
    mixes versions under this policy, which a restart keeps to as well; None: it promises nothing of the kind."""

    @property
    def one_version(self) -> Whole | None: ...

    async def land(self, traffic: Traffic, flip: FlipNow, *, version: int) -> None: ...
