"""Importance weights for samples of another policy. Shapes: K trained tokens, flat.

With rho = pi_prox(y) / mu(y), pi_prox the policy the step starts from and mu the one that sampled, the objective is

    J = w(rho) * pi(y) / pi_prox(y) * A

    truncated   w = min(rho, cap)           TIS: bias for bounded variance. Ionides 2008; for LLM RL Yao et al. 2025,
                                            "Your efficient RL framework secretly brings you off-policy RL training"
    masked      w = rho where rho <= cap    MIS: tokens further off teach nothing. Liu et al. 2025, "When speed kills stability"
                    0   elsewhere

The weight is a constant: no gradient flows through it. There is one optimizer step per batch, hence pi_prox is the current policy
before the step, pi / pi_prox is 1 in value, and the clip has nothing to act on: it is not applied. Degenerate case: rho = 1
gives the plain policy gradient. It does not weigh whole sequences.
"""

from __future__ import annotations

import torch
from torch import Tensor


def truncated(ratio_K: Tensor, *, cap: float) -> Tensor:
    """min(rho, cap), without gradient."""
    return ratio_K.detach().clamp(max=cap)


def masked(ratio_K: Tensor, *, cap: float) -> Tensor:
    """rho up to cap and 0 beyond, without gradient."""
    ratio_K = ratio_K.detach()
    return torch.where(ratio_K > cap, torch.zeros_like(ratio_K), ratio_K)


def weighted(logprobs_K: Tensor, advantages_K: Tensor, weights_K: Tensor) -> Tensor:
    """J per token, to be maximised: in value w * A, in gradient w * A * grad log pi."""
    return weights_K * torch.exp(logprobs_K - logprobs_K.detach()) * advantages_K
