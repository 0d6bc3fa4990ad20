"""Clipped importance-sampling policy optimization: the weight is clipped, not the token. Shapes: K trained tokens, flat.

    J = sg(min(r, cap)) * A * log pi(y),         cap = ``epsilon_high``, sg: constant in the gradient

MiniMax-M1, arXiv:2506.13585, without its lower bound; ScaleRL, arXiv:2510.13786, recommends a cap of 5. Every token
keeps a gradient, however far the policy has moved: this is REINFORCE with a truncated importance weight. Degenerate case:
r = 1 is REINFORCE. The value of J means nothing; only its gradient does.
"""

from __future__ import annotations

import torch

from corrente.algo.policy import PolicyInputs, PolicyTerm, cut
from corrente.config.objectives import RatioLevel


def cispo(inputs: PolicyInputs, *, epsilon_high: float, importance_sampling_level: RatioLevel) -> PolicyTerm:
    """J per token, weighed by the ratio of the token, or of its row with level sequence."""
    ratio_K = torch.exp(inputs.log_ratio_at(importance_sampling_level)).detach()
    value_K = ratio_K.clamp(max=epsilon_high) * inputs.advantages_K * inputs.logprobs_K
    return cut(value_K, low_K=torch.zeros_like(ratio_K, dtype=torch.bool), high_K=ratio_K > epsilon_high)
