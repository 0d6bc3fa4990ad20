"""Low-variance estimates of a divergence from samples. Shapes: K tokens, flat."""

from __future__ import annotations

import torch
from torch import Tensor

from corrente.algo.ratio import log_ratio


def k3(logprobs_K: Tensor, reference_K: Tensor) -> Tensor:
    """x - 1 - log x with x = pi_ref(y) / pi(y): per token never negative, and for y ~ pi an unbiased estimate of KL(pi || ref).

    Schulman 2020, "Approximating KL divergence", estimator k3; in GRPO arXiv:2402.03300, equation 4. The gradient flows
    through pi alone. For y sampled by an older policy it is biased; it is not importance weighted.
    """
    log_x_K = -log_ratio(logprobs_K, reference_K)
    return torch.exp(log_x_K) - 1 - log_x_K
