"""The smallest environment: one prompt, one completion. No tools, no dialogue."""

from __future__ import annotations

from corrente.env.base import Generate
from corrente.types import Prompt, Request, Sampling, Turn


class SingleTurn:
    """Implements Env: the prompt is a given turn, the completion a sampled one."""

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling

    async def play(self, prompt: Prompt, generate: Generate, *, key: str, group: str, seed: int) -> tuple[Turn, ...]:
        request = Request(id=f"{key}/0", tokens=prompt.tokens, sampling=self._sampling, seed=seed, group=group)
        completion = await generate(request)
        return (
            Turn(speaker="user", tokens=prompt.tokens),
            Turn(speaker="policy", tokens=completion.tokens, completion=completion, parent=0),
        )
