"""How far the current policy has moved from the one that sampled, token by token.

Shapes: K trained tokens, flat. The behaviour log-probs are constants recorded at sampling: no gradient flows through them.
"""

from __future__ import annotations

from torch import Tensor

LOG_RATIO_MAX = 20.0
"""exp(20) is 5e8: beyond it a ratio says only "not the same policy", and exp would overflow into NaN gradients."""


def log_ratio(logprobs_K: Tensor, behaviour_K: Tensor) -> Tensor:
    """log pi(y) - log mu(y), held within +-20 (with no gradient outside); NaN stays NaN, so that divergence is seen."""
    return (logprobs_K - behaviour_K.detach()).clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX)
