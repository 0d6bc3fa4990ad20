"""Direct reward optimisation: regress each token's log-ratio on its advantage. Shapes: K trained tokens, flat.

    J = A log pi(y) - tau / 2 * (log pi(y) - log p(y))^2

Richemond et al. 2024, arXiv:2405.19107, with the group's baseline for the learned value, and token by token instead of over the
sequence (kimi.py has that one). Nothing is weighed by a ratio; the square holds pi near p, the more the larger ``tau``.
Degenerate cases: at pi = p it is REINFORCE; tokens without advantage are still pulled towards p. The value of J means
nothing; only its gradient does.
"""

from __future__ import annotations

from torch import Tensor

from corrente.algo.policy import PolicyInputs


def dro(inputs: PolicyInputs, *, tau: float) -> Tensor:
    """J per token (K,)."""
    return inputs.advantages_K * inputs.logprobs_K - tau / 2 * inputs.unclamped_log_ratio_K.square()
