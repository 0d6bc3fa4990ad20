"""Estimates of a divergence from samples, in the loss or in the reward. Shapes: K tokens, flat.

Schulman 2020, "Approximating KL divergence". With l = log pi(y) - log ref(y) and y ~ pi, all estimate KL(pi || ref):

    k1 = l                     unbiased, of either sign; as a loss its gradient is 0 on average: use it in the reward
    k2 = l^2 / 2               biased, never negative; as a loss its gradient is the unbiased one of KL(pi || ref)
    k3 = e^-l - 1 + l          unbiased, never negative; as a loss its gradient is that of KL(ref || pi), weighted by pi / ref.
                               GRPO: arXiv:2402.03300, equation 4

In the loss: + beta * k, times the ratio pi / p with ``use_bias_correction_kl``, through which gradient flows: DeepSeek-V3.2,
arXiv:2512.02556, section 3.1; then k1 and k3 have the gradient of KL(pi || ref), also on stale samples, whose weight is not
bounded. In the reward: A_t - beta * sum of k over the token and those after it, the return of a per-token penalty
(REINFORCE++, arXiv:2501.03262, equation 5), which is a constant in the gradient and has no baseline.
Degenerate case: pi = ref gives 0. For y of an older policy all are biased unless corrected.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from corrente.algo.ratio import log_ratio


def k1(logprobs_K: Tensor, reference_K: Tensor) -> Tensor:
    """log pi - log ref."""
    return log_ratio(logprobs_K, reference_K)


def k2(logprobs_K: Tensor, reference_K: Tensor) -> Tensor:
    """Half the square of log pi - log ref."""
    return log_ratio(logprobs_K, reference_K).square() / 2


def k3(logprobs_K: Tensor, reference_K: Tensor) -> Tensor:
    """x - 1 - log x with x = ref / pi."""
    log_x_K = -log_ratio(logprobs_K, reference_K)
    return torch.exp(log_x_K) - 1 - log_x_K


ESTIMATORS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
