"""Age in the loss, from recorded versions to the gradient: the mask first, then the importance weight, then the decay."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from corrente import config as c
from corrente.algo import graph
from corrente.algo.base import Trained
from corrente.algo.losses import PolicyObjective
from corrente.data.types import Group
from corrente.learner.packing import plan_packs
from corrente.staleness.policies import ByVersion
from corrente.testing import samples

BEHAVIOUR = np.log(np.array([0.5, 0.4, 0.1, 0.5], np.float32))
NOW = [0.5, 0.2, 0.5, 0.6]
"""Of the current policy: ratios 1, 0.5, 5, 1.2."""


def group() -> Group:
    """One completion of four tokens, of versions 0, 1, 1 and 2."""
    answer = samples.completion(tokens=(3, 4, 5, 6), versions=(0, 1, 1, 2), logprobs=BEHAVIOUR)
    return samples.group(episodes=[samples.episode(turns=[(7, 8), answer])])


def test_age_masks_weighs_and_decays_in_this_order():
    """At version 2 with mask 1 the token of version 0 is out; weights are min(ratio, 2) * 0.5^age; the denominator stays 4."""
    staleness = c.Staleness(mask=1, decay=0.5, correct="tis", correct_cap=2.0)
    oldest = ByVersion(mask=staleness.mask).judge(group(), 2).oldest_trainable
    (episode,) = group().episodes
    rows = graph.rows(0, episode, advantages_T=np.full(4, 3.0), oldest=oldest)
    batch = samples.batch(version=2, rows=rows, tokens=4)
    objective = PolicyObjective(c.RunConfig(algo=c.Algo(objective=c.ReinforceObjective()), staleness=staleness))
    (pack,) = plan_packs(batch.rows, weights_R=objective.row_weights(batch), version=2, budget=100)
    assert pack.lags_K.tolist() == [1, 1, 0]
    logprobs_K = torch.log(torch.tensor(NOW[1:], dtype=torch.float64)).requires_grad_()
    loss = objective(
        Trained(
            logprobs_K=logprobs_K,
            behaviour_K=torch.from_numpy(pack.behaviour_K).double(),
            advantages_K=torch.from_numpy(pack.advantages_K).double(),
            weights_K=torch.from_numpy(pack.weights_K),
            lags_K=torch.from_numpy(pack.lags_K),
        )
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
