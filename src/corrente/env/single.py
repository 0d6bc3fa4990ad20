"""The smallest environment: one prompt, one completion. No tools, no dialogue."""

from __future__ import annotations

from corrente.data.types import Prompt, Request, Sampling, Turn
from corrente.env.base import Generate, PlayedEpisode
from corrente.errors import GenerationError


class SingleTurnEnv:
    """Implements Env: the prompt is one turn, the completion the next. A completion that was aborted from outside is no sample of
    the policy, for its length depends on when it was aborted; it fails the episode."""

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling

    async def play(self, prompt: Prompt, generate: Generate, *, key: str, group: str, seed: int) -> PlayedEpisode:
        request = Request(id=f"{key}/0", tokens=prompt.tokens, sampling=self._sampling, seed=seed, group=group)
        completion = await generate(request)
        if completion.finish_reason == "abort":
            raise GenerationError(f"request {request.id} was aborted after {len(completion.tokens)} tokens")
        given = Turn(speaker="user", tokens=prompt.tokens)
        sampled = Turn(speaker="policy", tokens=completion.tokens, completion=completion, parent=0)
        return PlayedEpisode(turns=(given, sampled))
