"""Kimi's objectives: regress a sequence's log-ratio on its advantage. Shapes: K trained tokens, flat; T tokens of a row.

    L = sum_t log pi(y_t) - log p(y_t) over the row
    kimi_k15   J_row = A L - tau / 2 * L^2                k1.5: arXiv:2501.12599, equation 3, the surrogate it differentiates
    kimi_k2    J_row = -(A - tau L)^2                     K2: arXiv:2507.20534, section 3.2.2

Both are largest at L = A / tau, which is the optimum of the reward regularised by tau KL(pi || p): J_k2 = 2 tau J_k15 - A^2, so
their gradients differ by the factor 2 tau alone. Nothing is weighed by a ratio: an old sample does not lose influence, it is
held near p by the square, the more the further off it is, for L has no bound. ``tau`` 0.1. Each token is given J_row / T, A
being its own advantage; they sum to J_row.
Degenerate cases: at L = 0, k15 is REINFORCE; tokens without advantage are still pulled towards p.
"""

from __future__ import annotations

from torch import Tensor

from corrente.algo.policy import PolicyInputs


def kimi_k15(inputs: PolicyInputs, *, tau: float) -> Tensor:
    """J per token (K,): a policy gradient with a squared penalty."""
    log_K = inputs.rows.sum(inputs.unclamped_log_ratio_K)
    gain_K = inputs.advantages_K * inputs.unclamped_log_ratio_K
    return gain_K - tau / 2 * log_K.square() / inputs.rows.length_K


def kimi_k2(inputs: PolicyInputs, *, tau: float) -> Tensor:
    """J per token (K,): a squared error."""
    log_K = inputs.rows.sum(inputs.unclamped_log_ratio_K)
    return -(inputs.advantages_K - tau * log_K).square() / inputs.rows.length_K
