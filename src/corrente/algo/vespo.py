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

from corrente.algo.policy import PolicyInputs, PolicyTerm, uncut
from corrente.config import Algo

LEAST = math.log(1e-8)
"""Log of the smallest weight told apart from 0, as the authors' and TRL's code have it."""


def vespo(seen: PolicyInputs, algo: Algo) -> PolicyTerm:
    """The ratio is to the proximal policy: with the behaviour policy in its place, w corrects for that one as well."""
    log_w_K = seen.rows.sum(seen.log_ratio_K.detach()).clamp(LEAST, 20.0)
    good_K = seen.advantages_K >= 0
    k_K = torch.full_like(log_w_K, algo.vespo_k_neg).masked_fill(good_K, algo.vespo_k_pos)
    decay_K = torch.full_like(log_w_K, algo.vespo_lambda_neg).masked_fill(good_K, algo.vespo_lambda_pos)
    phi_K = torch.exp(decay_K + k_K * log_w_K - decay_K * log_w_K.exp())
    return uncut(phi_K * seen.advantages_K * seen.logprobs_K)
