"""The clipped policy objective, with unequal bounds and dual clip. Shapes: K trained tokens, flat.

    J = min(r A, clip(r, 1 - low, 1 + high) A)         PPO, Schulman et al. 2017, arXiv:1707.06347, equation 7
    high > low ("clip higher")                         DAPO, Yu et al. 2025, arXiv:2503.14476, section 3.1
    J = max(J, delta A) where A < 0                    dual clip, Ye et al. 2020, arXiv:1912.09729, equation 5

A token whose ratio has already moved past the bound in the direction its advantage pushes gets no gradient. Without dual clip a
token with A < 0 and a large ratio has an unbounded loss: stale samples make such tokens common. Degenerate case: at r = 1
nothing is clipped and the gradient is A * grad log pi (REINFORCE).
"""

from __future__ import annotations

import torch
from torch import Tensor


def clipped(
    ratio_K: Tensor, advantages_K: Tensor, *, epsilon: float, epsilon_high: float, delta: float | None
) -> Tensor:
    """J per token, to be maximised. ``delta`` > 1 + epsilon_high, or None for no dual clip."""
    free_K = ratio_K * advantages_K
    bounded_K = ratio_K.clamp(1 - epsilon, 1 + epsilon_high) * advantages_K
    value_K = torch.minimum(free_K, bounded_K)
    if delta is None:
        return value_K
    return torch.where(advantages_K < 0, torch.maximum(value_K, delta * advantages_K), value_K)


def too_low(ratio_K: Tensor, advantages_K: Tensor, *, epsilon: float) -> Tensor:
    """Tokens without gradient because they are already less likely than the bound, and were to become less so still."""
    return (ratio_K < 1 - epsilon) & (advantages_K < 0)


def too_high(ratio_K: Tensor, advantages_K: Tensor, *, epsilon_high: float) -> Tensor:
    """Tokens without gradient because they are already more likely than the bound, and were to become more so still."""
    return (ratio_K > 1 + epsilon_high) & (advantages_K > 0)


def far_off(ratio_K: Tensor, advantages_K: Tensor, *, delta: float | None) -> Tensor:
    """Tokens without gradient because of the dual clip."""
    if delta is None:
        return torch.zeros_like(ratio_K, dtype=torch.bool)
    return (ratio_K > delta) & (advantages_K < 0)
