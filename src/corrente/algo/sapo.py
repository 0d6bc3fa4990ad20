"""Soft adaptive policy optimization: a smooth gate in place of the clip. Shapes: K trained tokens, flat.

    J = 4 / tau * sigmoid(tau * (r - 1)) * A,           tau = temperature_pos where A > 0, temperature_neg elsewhere

Gao et al. 2025, arXiv:2511.20347. The gradient is that of r A times 4 s (1 - s), s the sigmoid: 1 at r = 1, and less
the further r is from it, in either direction. With temperature_neg above temperature_pos (1.05, 1) it shrinks sooner where a
token is to become less likely. No token is cut. Degenerate case: at r = 1 the gradient is A * grad log pi.
"""

from __future__ import annotations

import torch
from torch import Tensor

from corrente.algo.policy import PolicyInputs
from corrente.config.objectives import RatioLevel


def sapo(
    inputs: PolicyInputs, *, temperature_pos: float, temperature_neg: float, importance_sampling_level: RatioLevel
) -> Tensor:
    """J per token (K,), of the ratio of the token, or of its row with level sequence."""
    ratio_K = torch.exp(inputs.log_ratio_at(importance_sampling_level))
    good_K = inputs.advantages_K > 0
    steep_K = torch.full_like(ratio_K, temperature_neg).masked_fill(good_K, temperature_pos)
    return 4 / steep_K * torch.sigmoid(steep_K * (ratio_K - 1)) * inputs.advantages_K
