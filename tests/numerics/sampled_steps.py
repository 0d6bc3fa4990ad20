"""Steps of what a tiny engine sampled, dense or a mixture of experts, and how far a learner is from the engine on them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from tests.numerics.tiny_engine import Served, tiny

from corrente.algo.grouped import GroupedAlgorithm
from corrente.config import RunConfig
from corrente.data.types import Batch, Completion, Sampling, Tokens
from corrente.learner.packing import plan_packs
from corrente.learner.policy import Policy
from corrente.testing import samples

PROMPTS = [np.arange(2, 2 + length, dtype=np.int32) for length in (3, 9)]


def policy_of(model: Any, sampling: Sampling) -> Policy:
    return Policy(copy.deepcopy(model), temperature=sampling.temperature)


def step_of(sampling: Sampling, answers: Sequence[tuple[Tokens, Sequence[Completion]]], *, version: int = 0) -> Batch:
    """The step that the algorithm makes of completions, prompt by prompt."""
    groups = [
        samples.group(
            id=at,
            episodes=[
                samples.episode(group=at, index=index, turns=[tokens, completion], reward=float(index))
                for index, completion in enumerate(completions)
            ],
        )
        for at, (tokens, completions) in enumerate(answers)
    ]
    algorithm = GroupedAlgorithm(RunConfig(sampling=sampling))
    return algorithm.batch(groups, step=0, version=version, oldest_trainable=[None] * len(groups))


def gaps(learner: Policy, step: Batch, *, budget: int = 10_000) -> np.ndarray:
    """|log ratio| of every trained token."""
    with torch.no_grad():
        return np.concatenate(
            [
                np.abs(learner(pack).logprobs_K.numpy() - pack.behaviour_K)
                for pack in plan_packs(
                    step.rows, weights_R=np.ones(len(step.rows)), version=step.version, budget=budget
                )
            ]
        )


MIXTURES = {"mixtral": (3, 2, 4), "qwen3_moe": (3, 3, 8)}
"""Layers, experts of a token, experts."""
mixtures = pytest.mark.parametrize("kind", list(MIXTURES))
LONG = Sampling(max_tokens=12, top_k=500, stop_token_ids=())


def serve_mixture(kind: str, **options: Any) -> tuple[Served, Any, Any]:
    where, model, other = tiny(kind)
    return Served(where, model, **({"keep_routing": True} | options)), model, other


def without_experts(step: Batch) -> Batch:
    return msgspec.structs.replace(step, rows=tuple(msgspec.structs.replace(row, experts=None) for row in step.rows))
