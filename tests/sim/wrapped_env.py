"""An environment around another, so that a test sees or changes what is asked of the engine."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec

from corrente.controller.parts import Parts
from corrente.data.types import Completion, Prompt, Request
from corrente.env.base import Env, Generate, PlayedEpisode

Around = Callable[[Prompt, Request, Generate], Awaitable[Completion]]


class WrappedEnv:
    """Implements Env. Plays like ``inner``; ``around`` answers its requests, with the engine's ``generate`` in hand."""

    def __init__(self, inner: Env, around: Around) -> None:
        self._inner, self._around = inner, around

    async def play(self, prompt: Prompt, generate: Generate, *, key: str, group: str, seed: int) -> PlayedEpisode:
        async def answered(request: Request) -> Completion:
            return await self._around(prompt, request, generate)

        return await self._inner.play(prompt, answered, key=key, group=group, seed=seed)


def wrap_env(around: Around) -> Callable[[Parts], Parts]:
    """A ``change`` for ``simulate`` that puts ``around`` between the environment and the engine."""
    return lambda parts: msgspec.structs.replace(parts, env=WrappedEnv(parts.env, around))
