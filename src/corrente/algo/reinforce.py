"""REINFORCE: no ratio, no bound. Shapes: K trained tokens, flat.

    J = A * log pi(y)

Williams 1992. It treats every sample as the current policy's own; with a stale sample its gradient is biased, without bound on
how much. Truncated REINFORCE is this with ``staleness.correct = "tis"``: J = sg(min(pi / mu, cap)) * A * log pi. The value of J
means nothing; only its gradient does.
"""

from __future__ import annotations

from torch import Tensor

from corrente.algo.policy import PolicyInputs


def reinforce(inputs: PolicyInputs) -> Tensor:
    """J per token (K,)."""
    return inputs.advantages_K * inputs.logprobs_K
