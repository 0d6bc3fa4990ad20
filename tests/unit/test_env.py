"""The single-turn environment: one request, two turns, tokens exactly as given and as sampled."""

from __future__ import annotations

import anyio
import numpy as np
import pytest

from corrente.env.single import SingleTurn
from corrente.errors import GenerationError
from corrente.testing.stages import check_env
from corrente.types import Completion, Prompt, Request, Sampling, Span


def test_one_request_carries_prompt_sampling_seed_and_group():
    sampling = Sampling(max_tokens=3, stop=("\n",))
    prompt = Prompt(id="0/7", tokens=np.array([5, 6, 7], np.int32))
    answer = Completion(
        tokens=np.array([8, 9], np.int32),
        logprobs=np.array([-1.0, -2.0], np.float32),
        spans=(Span(4, 0, 2),),
        finish_reason="stop",
    )
    asked: list[Request] = []

    async def generate(request: Request) -> Completion:
        asked.append(request)
        return answer

    async def play():
        return await SingleTurn(sampling).play(prompt, generate, key="12/3", group="12", seed=99)

    given, sampled = anyio.run(play)
    (request,) = asked
    assert (request.id, request.group, request.seed, request.sampling) == ("12/3/0", "12", 99, sampling)
    assert request.tokens is prompt.tokens
    assert given.tokens is prompt.tokens
    assert given.completion is None
    assert sampled.tokens is answer.tokens
    assert sampled.completion is answer
    assert sampled.parent == 0


def test_refusal_of_the_engine_passes_through():
    async def generate(request: Request) -> Completion:
        raise GenerationError("no room")

    async def play():
        prompt = Prompt(id="0/0", tokens=np.zeros(1, np.int32))
        await SingleTurn(Sampling()).play(prompt, generate, key="0/0", group="0", seed=0)

    with pytest.raises(GenerationError):
        anyio.run(play)


def test_environment_keeps_its_contract():
    prompt = Prompt(id="0/0", tokens=np.array([3, 4], np.int32))
    anyio.run(check_env, lambda: SingleTurn(Sampling()), prompt)
