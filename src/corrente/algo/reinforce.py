"""REINFORCE: no ratio, no bound. Shapes: K trained tokens, flat.

    J = A * log pi(y)

Williams 1992. It treats every sample as the current policy's own; with a stale sample its gradient is biased, without bound on
how much. Truncated REINFORCE is this with ``staleness.correct = "tis"``: J = sg(min(pi / mu, cap)) * A * log pi. The value of J
means nothing; only its gradient does.
"""

from __future__ import annotations

from corrente.algo.policy import PolicyInputs, PolicyTerm, uncut
from corrente.config import Algo


def reinforce(seen: PolicyInputs, algo: Algo) -> PolicyTerm:
    """Reads no setting."""
    return uncut(seen.advantages_K * seen.logprobs_K)
