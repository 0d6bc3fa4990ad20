"""Tapered off-policy REINFORCE: good samples as they are, bad ones by how likely they still are. Shapes: K trained tokens, flat.

    J = A * log pi(y)                    where A >= 0
    J = sg(min(w, 1)) * A * log pi(y)    where A < 0,       w = prod_t pi(y_t) / p(y_t) over the row; sg: constant

Le Roux et al. 2025, arXiv:2503.14286. A good sample of another policy is a demonstration, and pulling towards it
converges; pushing away from a bad one does not, so it fades as the policy leaves it. Degenerate case: w >= 1 is REINFORCE.
The value of J means nothing; only its gradient does.
"""

from __future__ import annotations

import torch

from corrente.algo import ratio
from corrente.algo.policy import PolicyInputs, PolicyTerm, cut


def topr(inputs: PolicyInputs) -> PolicyTerm:
    """J per token (K,)."""
    log_w_K = ratio.product(inputs.log_ratio_K.detach(), inputs.rows)
    bad_K = inputs.advantages_K < 0
    weight_K = torch.where(bad_K, log_w_K.clamp(max=0).exp(), 1.0)
    value_K = weight_K * inputs.advantages_K * inputs.logprobs_K
    return cut(value_K, low_K=bad_K & (log_w_K < 0), high_K=torch.zeros_like(bad_K))
