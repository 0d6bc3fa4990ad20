"""The single-turn environment: one request, two turns, tokens exactly as given and as sampled."""

from __future__ import annotations

import anyio
import msgspec
import pytest

from corrente.config import Eval
from corrente.data.types import Completion, Prompt, Request, Sampling
from corrente.env.base import Generate, PlayedEpisode
from corrente.env.single import SingleTurnEnv
from corrente.errors import GenerationError
from corrente.testing import samples, simulate
from corrente.testing.stages import check_env
from corrente.testing.world import World, flow


def test_one_request_carries_prompt_sampling_seed_and_group():
    sampling = Sampling(max_tokens=3, stop=("\n",))
    prompt, answer = samples.prompt(), samples.completion()
    asked: list[Request] = []

    async def generate(request: Request) -> Completion:
        asked.append(request)
        return answer

    async def play():
        return await SingleTurnEnv(sampling).play(prompt, generate, key="12/3", group="12", seed=99)

    given, sampled = anyio.run(play).turns
    (request,) = asked
    assert (request.id, request.group, request.seed, request.sampling) == ("12/3/0", "12", 99, sampling)
    assert request.tokens is prompt.tokens
    assert given.tokens is prompt.tokens
    assert given.completion is None
    assert sampled.tokens is answer.tokens
    assert sampled.completion is answer
    assert sampled.parent == 0


def test_aborted_completion_is_no_sample():
    async def generate(request: Request) -> Completion:
        return samples.completion(tokens=(8,), finish_reason="abort")

    async def play():
        return await SingleTurnEnv(Sampling()).play(samples.prompt(), generate, key="1/2", group="1", seed=0)

    with pytest.raises(GenerationError, match="1/2/0 was aborted after 1 tokens"):
        anyio.run(play)


def test_refusal_of_the_engine_passes_through():
    async def generate(request: Request) -> Completion:
        raise GenerationError("no room")

    async def play():
        await SingleTurnEnv(Sampling()).play(samples.prompt(), generate, key="0/0", group="0", seed=0)

    with pytest.raises(GenerationError):
        anyio.run(play)


def test_environment_keeps_its_contract():
    anyio.run(check_env, lambda: SingleTurnEnv(Sampling()), samples.prompt())


def test_evaluation_plays_held_out_prompts_in_its_own_environment():
    """Held-out prompts alone are sampled at the evaluation's temperature; training prompts never are."""
    training, evaluation = Recorder(temperature=1.0), Recorder(temperature=0.0)

    simulation = simulate(
        flow(steps=4, eval=Eval(every=2, temperature=0.0)),
        World(eval_rows=3),
        change=lambda parts: msgspec.structs.replace(parts, env=training, eval_env=evaluation),
    )
    assert simulation.error is None
    held_out = {prompt.id for prompt in simulation.parts.eval_prompts}
    assert {request.sampling.temperature for request in evaluation.requests} == {0.0}
    assert {request.sampling.temperature for request in training.requests} == {1.0}
    assert evaluation.played == held_out
    assert not training.played & held_out


class Recorder(SingleTurnEnv):
    def __init__(self, *, temperature: float) -> None:
        super().__init__(Sampling(temperature=temperature))
        self.played: set[str] = set()
        self.requests: list[Request] = []

    async def play(self, prompt: Prompt, generate: Generate, *, key: str, group: str, seed: int) -> PlayedEpisode:
        async def recorded(request: Request) -> Completion:
            self.requests.append(request)
            return await generate(request)

        self.played.add(prompt.id)
        return await super().play(prompt, recorded, key=key, group=group, seed=seed)
