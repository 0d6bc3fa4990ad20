"""The Environment protocol: a message in, a message and a reward out.

The smallest interface a game, a simulator or a user of the policy can have. It knows no tokens: ``conversation`` renders its
messages with the chat template, and keeps the policy's tokens as they were sampled.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import msgspec


class Observation(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """An environment's answer. ``messages``: chat messages for the next speaker, with at least a role and a content.

    ``reward``: for the message this answers; None where there is none. ``rewards``: by agent, for the episode, where several
    play. ``done``: nothing more is asked. ``agent``: whose turn is next. ``info``: numbers become metrics, the rest is
    recorded with the episode.
    """

    messages: tuple[dict[str, Any], ...] = ()
    reward: float | None = None
    done: bool = False
    rewards: dict[str, float] = {}
    agent: str = "policy"
    info: dict[str, Any] = {}


class Environment(Protocol):
    """Contract: one instance plays one episode at a time, and is ``reset`` before each. ``task`` holds the columns of the prompt.

    Equal task, seed and messages give equal observations: a resumed run plays an episode again from its start. ``close`` is
    called once, after the last episode, also of an instance that failed. Exceptions cost the episode.

    Methods need not be coroutines: plain ones are called in a thread. An environment may also have ``tools``, functions that the
    policy may call; what calls give goes back to it without a ``step``. One with ``without_tools``, a text that says why, is
    refused beside tools of the run's.
    """

    async def reset(self, task: Mapping[str, Any], *, seed: int) -> Observation: ...

    async def step(self, message: Mapping[str, Any]) -> Observation: ...

    async def close(self) -> None: ...
