"""The ratio of the current policy to another, token by token or by sequence, and the policy it is taken to.

    log r = log pi(y) - log p(y)                            p the proximal policy, which is one of
    behaviour    p = mu, the recorded one                   PPO: Schulman et al. 2017, arXiv:1707.06347
    recompute    p = pi before the first update             decoupled PPO: Hilton et al. 2021, arXiv:2110.00641
    interpolate  log p = log mu / d + (1 - 1/d) log pi,     d = lag; p = pi where d = 0. A-3PO: arXiv:2512.06547: no forward
                                                            pass for p, and it follows pi as the batch is used again
    level sequence: log s = mean of log r over the row      GSPO: Zheng et al. 2025, arXiv:2507.18071

Shapes: K trained tokens, flat. mu and p are constants: no gradient flows through them. Degenerate case: with recompute and one
update per batch p is pi itself, r is 1 in value, no clip acts, and the importance weight p / mu carries all of the correction.
"""

from __future__ import annotations

from torch import Tensor

from corrente.algo.rows import TrainingRows

LOG_RATIO_MAX = 20.0
"""exp(20) is 5e8: beyond it a ratio says only "not the same policy", and exp would overflow into NaN gradients."""
LOGPROB_MAX = 1e4
"""exp(-1e4) is 0 in float64 too. The square of a sum of larger ones would overflow float32, and a weight of 0 times inf is NaN:
engines write the least float32, -3e38, or -inf for a token that cannot be."""


def bounded(logprobs_K: Tensor) -> Tensor:
    """Log-probs held within +-1e4 (with no gradient outside), so that every objective is finite; NaN stays NaN."""
    return logprobs_K.clamp(-LOGPROB_MAX, LOGPROB_MAX)


def log_ratio(logprobs_K: Tensor, behaviour_K: Tensor) -> Tensor:
    """log pi(y) - log mu(y), held within +-20 (with no gradient outside); NaN stays NaN, so that divergence is seen."""
    return (logprobs_K - behaviour_K.detach()).clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX)


def interpolate(logprobs_K: Tensor, behaviour_K: Tensor, lags_K: Tensor) -> Tensor:
    """log p between the current and the behaviour policy, without gradient; the older the sample, the nearer to current."""
    share_K = (1 / lags_K.clamp(min=1).to(logprobs_K.dtype)).masked_fill(lags_K <= 0, 0.0)
    return share_K * behaviour_K.detach() + (1 - share_K) * logprobs_K.detach()


def geometric(log_ratio_K: Tensor, rows: TrainingRows) -> Tensor:
    """Mean of the log-ratios of a token's row: log of their geometric mean."""
    return rows.mean(log_ratio_K)


def product(log_ratio_K: Tensor, rows: TrainingRows) -> Tensor:
    """Sum of the log-ratios of a token's row, log of their product, held within +-20."""
    return rows.sum(log_ratio_K).clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX)
