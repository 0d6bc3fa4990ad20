"""Geometric-mean policy optimization: tokens are clipped one by one, and averaged as ratios are. Shapes: K trained tokens, flat.

    l_t = log pi(y_t) - log p(y_t)
    c_t = min(l_t, h) where A >= 0,  max(l_t, -h) where A < 0           h = -log(1 - low) below, log(1 + high) above
    J   = A * exp(mean_t c_t)                                           the same for every token of the row

Zhao et al. 2025, arXiv:2507.20673. The geometric mean keeps one outlier token from deciding the row, so bounds may be
wider than PPO's: the paper clips log-ratios at 0.4 (low 0.33, high 0.49). A is the advantage of the row; where it differs inside
a row each token has its own. Degenerate case: at l = 0 the gradient of a row is A times the mean of grad log pi.
"""

from __future__ import annotations

import math

import torch

from corrente.algo import ratio
from corrente.algo.policy import PolicyInputs, PolicyTerm, cut


def gmpo(inputs: PolicyInputs, *, epsilon: float, epsilon_high: float | None) -> PolicyTerm:
    """J per token (K,), its row's value. ``epsilon_high`` None: ``epsilon``."""
    log_K, good_K = inputs.log_ratio_K, inputs.advantages_K >= 0
    least, most = math.log1p(-epsilon), math.log1p(epsilon if epsilon_high is None else epsilon_high)
    held_K = torch.where(good_K, log_K.clamp(max=most), log_K.clamp(min=least))
    value_K = inputs.advantages_K * torch.exp(ratio.geometric(held_K, inputs.rows))
    now_K = log_K.detach()
    return cut(value_K, low_K=(now_K < least) & ~good_K, high_K=(now_K > most) & good_K)
