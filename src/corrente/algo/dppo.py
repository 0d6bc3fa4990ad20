"""Trust regions of probabilities instead of ratios: tokens that left the region teach nothing. Shapes: K trained tokens, flat.

    J = M * r * A,       r = pi(y) / p(y)

    dppo_tv   M = 0 where A > 0 and pi(y) - p(y) > high,  or A < 0 and p(y) - pi(y) > low
    dppo_kl   M = 0 where D > high and A > 0 and r > 1,   or D > low and A < 0 and r < 1
              D = p log(p / pi) + (1 - p) log((1 - p) / (1 - pi))     of the two outcomes "y" and "another token"
    ipo       M = 0 where pi(y) - p(y) > high or p(y) - pi(y) > low   whatever the sign of A

DPPO: Qi et al. 2026, "Rethinking the trust region in LLM reinforcement learning", arXiv:2602.04879; low and high are its delta.
ipo is the symmetric mask of INTELLECT's trainer (prime-rl). A ratio is a bad measure of distance for language models: a token of
probability 1e-4 that became 1e-3 has ratio 10 and moved nothing, one that fell from 0.9 to 0.5 has ratio 0.56 and moved most of
the mass. These bounds let the first through and stop the second. r is not bounded beyond them. With D, use smaller bounds than
with differences: 0.05. Degenerate case: at r = 1 nothing is masked and the gradient is A * grad log pi.
"""

from __future__ import annotations

import torch
from torch import Tensor

from corrente.algo.policy import PolicyInputs, PolicyTerm, cut


def dppo_tv(inputs: PolicyInputs, *, mask_low: float, mask_high: float) -> PolicyTerm:
    """J per token (K,): r A, but 0 where the probability moved too far in the direction of the advantage."""
    rise_K = _rise(inputs)
    good_K, bad_K = inputs.advantages_K > 0, inputs.advantages_K < 0
    return _masked(inputs, low_K=bad_K & (-rise_K > mask_low), high_K=good_K & (rise_K > mask_high))


def dppo_kl(inputs: PolicyInputs, *, mask_low: float, mask_high: float) -> PolicyTerm:
    """J per token (K,): r A, but 0 where the divergence of two outcomes is too large in the direction of the advantage."""
    divergence_K, log_K = binary_kl(inputs.logprobs_K.detach(), inputs.proximal_K), inputs.log_ratio_K.detach()
    low_K = (inputs.advantages_K < 0) & (log_K < 0) & (divergence_K > mask_low)
    high_K = (inputs.advantages_K > 0) & (log_K > 0) & (divergence_K > mask_high)
    return _masked(inputs, low_K=low_K, high_K=high_K)


def ipo(inputs: PolicyInputs, *, mask_low: float, mask_high: float) -> PolicyTerm:
    """J per token (K,): r A, but 0 where the probability moved too far in either direction."""
    rise_K = _rise(inputs)
    return _masked(inputs, low_K=-rise_K > mask_low, high_K=rise_K > mask_high)


def binary_kl(logprobs_K: Tensor, proximal_K: Tensor) -> Tensor:
    """KL(p || pi) of "this token" against "another one", from log-probs; 0 at equal ones, finite at probabilities 0 and 1."""
    tiny = torch.finfo(logprobs_K.dtype).tiny
    p_K, pi_K = proximal_K.exp().clamp(max=1), logprobs_K.exp().clamp(max=1)
    rest_K = (1 - p_K) * (torch.log((1 - p_K).clamp(min=tiny)) - torch.log((1 - pi_K).clamp(min=tiny)))
    return p_K * (proximal_K - logprobs_K) + rest_K


def _rise(inputs: PolicyInputs) -> Tensor:
    return inputs.logprobs_K.detach().exp() - inputs.proximal_K.exp()


def _masked(inputs: PolicyInputs, *, low_K: Tensor, high_K: Tensor) -> PolicyTerm:
    value_K = torch.exp(inputs.log_ratio_K) * inputs.advantages_K
    # the mask is on the value and the gradient alike; a product with 0 would let an overflow through as NaN
    return cut(torch.where(low_K | high_K, 0.0, value_K), low_K=low_K, high_K=high_K)
