"""How a prompt is played: one completion, a conversation, a game."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import msgspec

from corrente.data.types import LARGEST_REWARD, Completion, Prompt, Request, StepScore, Turn
from corrente.errors import RolloutError

Generate = Callable[[Request], Awaitable[Completion]]
"""The engine as an environment sees it."""


class Played(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One episode as it was played; the fields are copied into the Episode of the same name.

    ``turns`` is a graph: where the conversation was rendered anew, later turns hang from another parent. ``messages``: what was
    said after the prompt, as chat messages; empty for one plain completion. ``opening``: the text that the first turn was sampled
    after, where it is more than the prompt's. ``rewards``: by name, what the environment itself gave for the whole episode, None
    where it does not apply; ``step_scores``: for single turns. ``agent_rewards``: by speaker, where several play. ``cut``: it
    ended because no token was left. ``environment``: the live object, for reward functions; ``release`` is awaited once, when
    they are done.
    """

    turns: tuple[Turn, ...]
    messages: tuple[dict[str, Any], ...] = ()
    opening: str = ""
    rewards: dict[str, float | None] = {}
    agent_rewards: dict[str, float] = {}
    step_scores: tuple[StepScore, ...] = ()
    cut: bool = False
    metrics: dict[str, float] = {}
    extra: dict[str, Any] = {}
    environment: Any = None
    release: Callable[[], Awaitable[None]] | None = None


class Env(Protocol):
    """Contract: ``play`` returns the turns of one episode, tokens exactly as sampled. ``key`` is unique to the episode and
    ``seed`` makes its sampling repeatable; requests made in one play use ids that begin with ``key``. ``group`` names the
    prompt's shared key/value cache: only requests whose context is the prompt alone carry it. Exceptions (RolloutError or any
    other) cost this episode only. What a play holds when it raises, or is cancelled, it gives back itself."""

    async def play(self, prompt: Prompt, generate: Generate, *, key: str, group: str, seed: int) -> Played: ...


def finite(reward: Any, name: str) -> float:
    """A reward as a number. RolloutError for what is none, not finite, or too large for float32 to compute with."""
    try:
        number = float(reward)
    except (TypeError, ValueError, OverflowError):
        raise RolloutError(f"{name} gave the reward {reward!r}; it must be a number") from None
    if not abs(number) <= LARGEST_REWARD:
        raise RolloutError(
            f"{name} gave the reward {number}; it must be finite, and at most {LARGEST_REWARD:g} in size"
        )
    return number
