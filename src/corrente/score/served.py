"""A teacher behind vLLM's OpenAI-compatible endpoint: ``/v1/completions`` returns the log-probs of a prompt's own tokens.

Token ids are sent, so nothing is tokenised again. Servers return untempered log-probs, so they can teach where tokens are
sampled at temperature 1. The server must generate one token; it is thrown away.
"""

from __future__ import annotations

import msgspec
import numpy as np

from corrente.data.types import Scores, Tokens
from corrente.errors import RewardError
from corrente.score.endpoint import Endpoint


class _Entry(msgspec.Struct):
    logprob: float
    rank: int | None = None


class _Choice(msgspec.Struct):
    prompt_logprobs: list[dict[str, _Entry] | None] | None = None


class _CompletionAnswer(msgspec.Struct):
    """The fields of a completion's answer that are read."""

    choices: list[_Choice]


class ServedTeacher:
    """Implements Teacher over a server. ``model``: its name there."""

    def __init__(self, endpoint: Endpoint, *, model: str, name: str) -> None:
        self._endpoint, self._model, self._name = endpoint, model, name

    async def score(self, tokens: Tokens, *, top: int = 0) -> Scores:
        """See Engine.score. RewardError where the server has no such answer."""
        body = {
            "model": self._model,
            "prompt": tokens.tolist(),
            "max_tokens": 1,
            "temperature": 0,
            "prompt_logprobs": top,
        }
        answer = await self._endpoint.ask(body)
        try:
            (choice,) = msgspec.json.decode(answer, type=_CompletionAnswer).choices
        except (msgspec.DecodeError, ValueError) as error:
            raise RewardError(f"{self._name}: {self._endpoint.url} answered with no completion: {error}") from None
        return _prompt_scores(choice, tokens, top, who=f"{self._name}: {self._endpoint.url}")

    async def close(self) -> None:
        """Close its connections."""
        await self._endpoint.close()


def _prompt_scores(choice: _Choice, tokens: Tokens, top: int, *, who: str) -> Scores:
    places = choice.prompt_logprobs
    if places is None:
        raise RewardError(f"{who} gives no log-probs of a prompt; vLLM does")
    if len(places) != len(tokens):
        raise RewardError(f"{who} gave {len(places)} log-probs for {len(tokens)} tokens")
    logprobs = np.empty(len(tokens) - 1, np.float32)
    ids, best = np.empty((len(tokens) - 1, top), np.int32), np.empty((len(tokens) - 1, top), np.float32)
    for at, (place, token) in enumerate(zip(places[1:], tokens[1:].tolist(), strict=True)):
        if place is None or str(token) not in place or len(place) < top:
            raise RewardError(f"{who} left out token {at + 1}, or some of the {top} likeliest there")
        logprobs[at] = place[str(token)].logprob
        likeliest = sorted(place.items(), key=lambda item: -item[1].logprob)[:top]
        ids[at] = [int(number) for number, _ in likeliest]
        best[at] = [entry.logprob for _, entry in likeliest]
    return Scores(logprobs=logprobs, top_ids=ids, top_logprobs=best)
