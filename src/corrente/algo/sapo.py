"""Soft adaptive policy optimization: a smooth gate in place of the clip. Shapes: K trained tokens, flat.

    J = 4 / tau * sigmoid(tau * (r - 1)) * A,           tau = tau_pos where A > 0, tau_neg elsewhere

Gao et al. 2025, arXiv:2511.20347. The gradient is that of r A times 4 s (1 - s), s the sigmoid: 1 at r = 1, and less
the further r is from it, in either direction. tau_neg > tau_pos (1.05, 1) shrinks it sooner where a token is to become less
likely. No token is cut. Degenerate case: at r = 1 the gradient is A * grad log pi.
"""

from __future__ import annotations

import torch

from corrente.algo.policy import PolicyInputs, PolicyTerm, uncut
from corrente.config import Algo


def sapo(seen: PolicyInputs, algo: Algo) -> PolicyTerm:
    """The ratio is of the token, or of the row with importance_sampling_level sequence."""
    ratio_K = torch.exp(seen.log_ratio_at(algo.importance_sampling_level))
    good_K = seen.advantages_K > 0
    steep_K = torch.full_like(ratio_K, algo.sapo_temperature_neg).masked_fill(good_K, algo.sapo_temperature_pos)
    return uncut(4 / steep_K * torch.sigmoid(steep_K * (ratio_K - 1)) * seen.advantages_K)
