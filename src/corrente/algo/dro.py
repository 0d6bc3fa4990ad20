"""Direct reward optimisation: regress each token's log-ratio on its advantage. Shapes: K trained tokens, flat.

    J = A log pi(y) - tau / 2 * (log pi(y) - log p(y))^2

Richemond et al. 2024, arXiv:2405.19107, with the group's baseline for the learned value, and token by token instead of over the
sequence (kimi.py has that one). Nothing is weighed by a ratio; the square holds pi near p, the more the larger ``tau``.
Degenerate cases: at pi = p it is REINFORCE; tokens without advantage are still pulled towards p. The value of J means
nothing; only its gradient does.
"""

from __future__ import annotations

from corrente.algo.policy import PolicyInputs, PolicyTerm, uncut
from corrente.config import Algo


def dro(seen: PolicyInputs, algo: Algo) -> PolicyTerm:
    """Reads ``algo.tau``."""
    return uncut(seen.advantages_K * seen.logprobs_K - algo.tau / 2 * seen.unclamped_log_ratio_K.square())
