"""Age in the loss, from recorded versions to the gradient: the mask first, then the importance weight, then the decay."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from corrente import config as c
from corrente.algo import graph
from corrente.algo.losses import PolicyObjective
from corrente.data.types import Batch, Completion, Episode, Group, Prompt, Span, Turn
from corrente.learner.packing import plan
from corrente.staleness.policies import ByVersion

PROMPT = np.array([7, 8], np.int32)
BEHAVIOUR = np.log(np.array([0.5, 0.4, 0.1, 0.5], np.float32))
NOW = [0.5, 0.2, 0.5, 0.6]
"""Of the current policy: ratios 1, 0.5, 5, 1.2."""


def group() -> Group:
    """One completion of four tokens, of versions 0, 1, 1 and 2."""
    completion = Completion(
        tokens=np.array([3, 4, 5, 6], np.int32),
        logprobs=BEHAVIOUR,
        spans=(Span(0, 0, 1), Span(1, 1, 3), Span(2, 3, 4)),
        finish_reason="stop",
    )
    turns = (
        Turn(speaker="user", tokens=PROMPT),
        Turn(speaker="policy", tokens=completion.tokens, completion=completion),
    )
    episode = Episode(prompt_id="0", group_id=0, index=0, turns=turns)
    return Group(id=0, prompt=Prompt(id="0", tokens=PROMPT), episodes=(episode,), admitted_version=0)


def test_age_masks_weighs_and_decays_in_this_order():
    """At version 2 with mask 1 the token of version 0 is out; weights are min(ratio, 2) * 0.5^age; the denominator stays 4."""
    staleness = c.Staleness(mask=1, decay=0.5, correct="tis", correct_cap=2.0)
    oldest = ByVersion(mask=staleness.mask).judge(group(), 2).oldest_trainable
    (episode,) = group().episodes
    rows = graph.rows(0, episode, advantages_T=np.full(4, 3.0), oldest=oldest)
    batch = Batch(step=0, version=2, rows=tuple(rows), sequences=1, tokens=4)
    objective = PolicyObjective(c.RunConfig(algo=c.Algo(objective=c.ReinforceObjective()), staleness=staleness))
    (pack,) = plan(batch.rows, weights_R=objective.row_weights(batch), version=2, budget=100)
    assert pack.lags_K.tolist() == [1, 1, 0]
    logprobs_K = torch.log(torch.tensor(NOW[1:], dtype=torch.float64)).requires_grad_()
    loss = objective(
        logprobs_K,
        behaviour_K=torch.from_numpy(pack.behaviour_K).double(),
        advantages_K=torch.from_numpy(pack.advantages_K).double(),
        weights_K=torch.from_numpy(pack.weights_K),
        lags_K=torch.from_numpy(pack.lags_K),
    )
    loss.total.backward()
    weights = [0.5 * 0.5, 2.0 * 0.5, 1.2 * 1.0]
    assert logprobs_K.grad is not None
    assert logprobs_K.grad.tolist() == pytest.approx([-w * 3.0 / 4 for w in weights], rel=1e-6)


def test_tokens_after_the_first_span_of_a_completion_are_mixed():
    (episode,) = group().episodes
    (row,) = graph.rows(0, episode, advantages_T=np.ones(4), oldest=None)
    assert row.mixed is not None
    assert row.mixed.tolist() == [False, False, False, True, True, True]
    (masked,) = graph.rows(0, episode, advantages_T=np.ones(4), oldest=2)
    assert masked.mixed is not None
    assert masked.mixed.tolist() == [False] * 5 + [True]
