"""Group sequence policy optimization: ratio, clip and reward are of whole sequences. Shapes: K trained tokens, flat.

    s = (prod_t pi(y_t) / p(y_t)) ^ (1/T)       geometric mean over the T tokens of the row
    gspo         J = min(s A, clip(s, 1 - low, 1 + high) A)                           the same for every token of the row
    gspo_token   the same with s_t = sg(s) * pi(y_t) / sg(pi(y_t))                    sg: constant in the gradient

Zheng et al. 2025, arXiv:2507.18071. A geometric mean stays far nearer to 1 than a token's ratio: the paper
clips at low 3e-4 and high 4e-4, the defaults. gspo_token has the value and, for one advantage per row, the gradient of
gspo, and lets advantages differ inside a row. Degenerate cases: one token per row is the clipped objective of that token;
at s = 1 the gradient of a row is A times the mean of grad log pi.
"""

from __future__ import annotations

from corrente.algo import ratio
from corrente.algo.clip import clip_log_ratio
from corrente.algo.policy import PolicyInputs, PolicyTerm


def gspo(inputs: PolicyInputs, *, epsilon: float, epsilon_high: float | None, delta: float | None) -> PolicyTerm:
    """J per token (K,), its row's value. ``epsilon_high`` None: ``epsilon``. luspo sums it over the row, gspo takes the mean."""
    of_row_K = ratio.geometric(inputs.log_ratio_K, inputs.rows)
    return clip_log_ratio(of_row_K, inputs.advantages_K, epsilon=epsilon, epsilon_high=epsilon_high, delta=delta)


def gspo_token(inputs: PolicyInputs, *, epsilon: float, epsilon_high: float | None, delta: float | None) -> PolicyTerm:
    """J per token (K,) of its row's ratio, with its own gradient and advantage."""
    of_row_K = ratio.geometric(inputs.log_ratio_K, inputs.rows).detach()
    own_K = inputs.logprobs_K - inputs.logprobs_K.detach()
    return clip_log_ratio(
        of_row_K + own_K, inputs.advantages_K, epsilon=epsilon, epsilon_high=epsilon_high, delta=delta
    )
