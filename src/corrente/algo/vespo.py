"""Variational sequence-level soft policy optimization: a gamma-shaped weight of whole sequences. Shapes: K trained tokens, flat.

    w = prod_t pi(y_t) / p(y_t) over the row            phi(w) = e^lambda * w^k * e^(-lambda w)
    J = sg(phi(w)) * A * log pi(y)                      k, lambda by the sign of A; sg: constant in the gradient

arXiv:2602.10693. phi(1) = 1, its largest value is at w = k / lambda, and it vanishes on both sides: a sequence that has become
very unlikely or very likely teaches little. The product runs over the whole row, so it falls with length as well. Degenerate
case: w = 1 is REINFORCE. The value of J means nothing; only its gradient does.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from corrente.algo.policy import PolicyInputs

LEAST = math.log(1e-8)
"""Log of the smallest weight told apart from 0, as the authors' and TRL's code have it."""


def vespo(inputs: PolicyInputs, *, k_pos: float, lambda_pos: float, k_neg: float, lambda_neg: float) -> Tensor:
    """J per token (K,). The ratio is to the proximal policy; where that is the behaviour policy, w corrects for staleness as
    well."""
    log_w_K = inputs.rows.sum(inputs.log_ratio_K.detach()).clamp(LEAST, 20.0)
    good_K = inputs.advantages_K >= 0
    k_K = torch.full_like(log_w_K, k_neg).masked_fill(good_K, k_pos)
    decay_K = torch.full_like(log_w_K, lambda_neg).masked_fill(good_K, lambda_pos)
    phi_K = torch.exp(decay_K + k_K * log_w_K - decay_K * log_w_K.exp())
    return phi_K * inputs.advantages_K * inputs.logprobs_K
