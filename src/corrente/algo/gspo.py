"""Group sequence policy optimization: ratios, clip and reward all of whole sequences. Shapes: K trained tokens, flat.

    s = (prod_t pi(y_t) / p(y_t)) ^ (1/T)       geometric mean over the T tokens of the row
    gspo         J = min(s A, clip(s, 1 - low, 1 + high) A)                           the same for every token of the row
    gspo_token   the same with s_t = sg(s) * pi(y_t) / sg(pi(y_t))                    sg: constant in the gradient

Zheng et al. 2025, arXiv:2507.18071. A geometric mean stays far nearer to 1 than a token's ratio: the paper
clips at low 3e-4 and high 4e-4, and so should you. gspo_token has the value and, for one advantage per row, the gradient of
gspo, and lets advantages differ inside a row. Degenerate cases: one token per row is the clipped objective of that token;
at s = 1 the gradient of a row is A times the mean of grad log pi.
"""

from __future__ import annotations

from corrente.algo import ratio
from corrente.algo.clip import of_log_ratio
from corrente.algo.policy import PolicyInputs, PolicyTerm
from corrente.config import Algo


def gspo(seen: PolicyInputs, algo: Algo) -> PolicyTerm:
    """Every token has its row's value."""
    return of_log_ratio(ratio.geometric(seen.log_ratio_K, seen.rows), seen.advantages_K, algo)


def gspo_token(seen: PolicyInputs, algo: Algo) -> PolicyTerm:
    """Every token has its row's ratio, and its own gradient and advantage."""
    of_row_K = ratio.geometric(seen.log_ratio_K, seen.rows).detach()
    own_K = seen.logprobs_K - seen.logprobs_K.detach()
    return of_log_ratio(of_row_K + own_K, seen.advantages_K, algo)
