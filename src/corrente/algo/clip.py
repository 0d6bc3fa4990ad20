"""The clipped policy objective, with unequal bounds and dual clip. Shapes: K trained tokens, flat.

    J = min(r A, clip(r, 1 - low, 1 + high) A)         PPO, Schulman et al. 2017, arXiv:1707.06347, equation 7
    high > low ("clip higher")                         DAPO, Yu et al. 2025, arXiv:2503.14476, section 3.1
    J = max(J, delta A) where A < 0                    dual clip, Ye et al. 2020, arXiv:1912.09729, equation 5

A token whose ratio has already moved past the bound in the direction its advantage pushes gets no gradient. Without dual clip a
token with A < 0 and a large ratio has an unbounded loss: stale samples make such tokens common. Degenerate case: at r = 1
nothing is clipped and the gradient is A * grad log pi (REINFORCE).

With ``importance_sampling_level`` sequence, r is the geometric mean of the row's ratios (ratio.py), one for all its tokens.
dapo, grpo, bnpo and dr_grpo are this objective with different averages (kinds.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from corrente.algo.policy import PolicyInputs, PolicyTerm, cut
from corrente.config.objectives import RatioLevel


def clip(
    inputs: PolicyInputs,
    *,
    epsilon: float,
    epsilon_high: float | None,
    delta: float | None,
    importance_sampling_level: RatioLevel,
) -> PolicyTerm:
    """J per token, of the ratio of the token, or of its row with level sequence."""
    log_ratio_K = inputs.log_ratio_at(importance_sampling_level)
    return clip_log_ratio(log_ratio_K, inputs.advantages_K, epsilon=epsilon, epsilon_high=epsilon_high, delta=delta)


def clip_log_ratio(
    log_ratio_K: Tensor, advantages_K: Tensor, *, epsilon: float, epsilon_high: float | None, delta: float | None
) -> PolicyTerm:
    """J per token for ratios given by their logarithm, differentiable in it. ``epsilon_high`` None: ``epsilon``."""
    ratio_K, high = torch.exp(log_ratio_K), epsilon if epsilon_high is None else epsilon_high
    value_K = clipped(ratio_K, advantages_K, epsilon=epsilon, epsilon_high=high, delta=delta)
    now_K = ratio_K.detach()
    return cut(
        value_K,
        low_K=too_low(now_K, advantages_K, epsilon=epsilon),
        high_K=too_high(now_K, advantages_K, epsilon_high=high),
        other_K=far_off(now_K, advantages_K, delta=delta),
    )


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
