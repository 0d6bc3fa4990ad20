"""How a prompt is played: one completion, a conversation, a game."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

from corrente.types import Completion, Prompt, Request, Turn

Generate = Callable[[Request], Awaitable[Completion]]
"""The engine as an environment sees it."""


class Env(Protocol):
    """Contract: ``play`` returns the turns of one episode, tokens exactly as sampled. ``key`` is unique to the episode and
    ``seed`` makes its sampling repeatable; requests made in one play use ids that begin with ``key``. ``group`` names the
    prompt's shared key/value cache. Exceptions (RolloutError or any other) cost this episode only."""

    async def play(
        self, prompt: Prompt, generate: Generate, *, key: str, group: str, seed: int
    ) -> tuple[Turn, ...]: ...
