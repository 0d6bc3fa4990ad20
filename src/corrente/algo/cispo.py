"""Clipped importance-sampling policy optimization: the weight is clipped, not the token. Shapes: K trained tokens, flat.

    J = sg(min(r, cap)) * A * log pi(y),         cap = ``algo.epsilon_high``, sg: constant in the gradient

MiniMax-M1, arXiv:2506.13585, without its lower bound; ScaleRL, arXiv:2510.13786, recommends a cap of 5. Every token
keeps a gradient, however far the policy has moved: this is REINFORCE with a truncated importance weight. Degenerate case:
r = 1 is REINFORCE. The value of J means nothing; only its gradient does.
"""

from __future__ import annotations

import torch

from corrente.algo.policy import PolicyInputs, PolicyTerm, cut, high_of
from corrente.config import Algo


def cispo(seen: PolicyInputs, algo: Algo) -> PolicyTerm:
    """The weight is of the token, or of the row with importance_sampling_level sequence."""
    ratio_K = torch.exp(seen.log_ratio_at(algo.importance_sampling_level)).detach()
    value_K = ratio_K.clamp(max=high_of(algo)) * seen.advantages_K * seen.logprobs_K
    return cut(value_K, low_K=torch.zeros_like(ratio_K, dtype=torch.bool), high_K=ratio_K > high_of(algo))
