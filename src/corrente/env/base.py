"""The Env protocol: a prompt is played as one completion, a conversation or a game."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import msgspec

from corrente.data.types import LARGEST_REWARD, Completion, Prompt, Request, StepScore, Turn
from corrente.errors import RolloutError

Generate = Callable[[Request], Awaitable[Completion]]
"""The engine as an environment sees it: a request in, its completion out."""


class PlayedEpisode(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One episode as it was played; its fields are copied into the Episode's fields of the same names.

    ``turns`` is a graph: where the conversation was rendered anew, later turns have another parent. ``messages``: the chat
    messages after the prompt; empty for one plain completion. ``opening``: the text that the first turn was sampled after,
    where it is more than the prompt's. ``rewards``: by name, the environment's own rewards for the whole episode, None where
    one does not apply. ``step_scores``: its rewards for single turns. ``agent_rewards``: by speaker, where several play.
    ``cut``: the episode ended because no token was left. ``environment``: the live object, for reward functions. ``release`` is
    awaited once, when they are done.
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
    other) cost this episode only. A play that raises, or is cancelled, releases everything it holds itself."""

    async def play(self, prompt: Prompt, generate: Generate, *, key: str, group: str, seed: int) -> PlayedEpisode: ...


def finite_reward(reward: Any, name: str) -> float:
    """Convert a reward to a float. RolloutError for one that is no number, not finite, or too large to compute with in
    float32."""
    try:
        number = float(reward)
    except (TypeError, ValueError, OverflowError):
        raise RolloutError(f"{name} gave the reward {reward!r}; it must be a number") from None
    if not abs(number) <= LARGEST_REWARD:
        raise RolloutError(
            f"{name} gave the reward {number}; it must be finite, and at most {LARGEST_REWARD:g} in size"
        )
    return number
