"""Importance weights from the behaviour policy to the one the objective starts from. Shapes: K trained tokens, flat.

    rho = p(y) / mu(y)                     p: the proximal policy (ratio.py), or the current one where p would be mu

    tis       w = min(max(rho, floor), cap)          bias for bounded variance. Ionides 2008; for LLM RL Yao et al. 2025,
                                                     "Your efficient RL framework secretly brings you off-policy RL training"
    mis       w = rho where rho <= cap, else out     tokens further off teach nothing. Liu et al. 2025, "When speed kills
                                                     stability"
    icepop    w = rho inside [floor, cap], else out  the same on both sides. Ling team 2025, arXiv:2510.18855: 0.5 and 5

    level token: rho of the token; sequence: the product over its row; geometric: the geometric mean over its row

``correct_cap_negative`` replaces the cap where the advantage is negative, which is where a large weight does harm. The weight is
a constant: no gradient flows through it. Degenerate case: rho = 1 gives w = 1 (if the bounds contain 1).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from corrente.algo import ratio
from corrente.algo.rows import TrainingRows

LEVELS: Mapping[str, Callable[[Tensor, TrainingRows], Tensor]] = {
    "token": lambda log_rho_K, rows: log_rho_K,
    "sequence": ratio.product,
    "geometric": ratio.geometric,
}


def caps(advantages_K: Tensor, *, cap: float, negative: float | None) -> Tensor:
    """The cap of each token, by the sign of its advantage."""
    return torch.full_like(advantages_K, cap).masked_fill(advantages_K < 0, cap if negative is None else negative)


def truncated(rho_K: Tensor, *, floor: float, cap_K: Tensor) -> tuple[Tensor, Tensor]:
    """Truncated weights, and the tokens that are kept: all of them."""
    return torch.minimum(rho_K.clamp(min=floor), cap_K), torch.ones_like(rho_K, dtype=torch.bool)


def masked(rho_K: Tensor, *, floor: float, cap_K: Tensor) -> tuple[Tensor, Tensor]:
    """Plain weights, and the tokens that are kept: those up to their cap. ``floor`` does not matter."""
    return rho_K, rho_K <= cap_K


def icepop(rho_K: Tensor, *, floor: float, cap_K: Tensor) -> tuple[Tensor, Tensor]:
    """Plain weights, and the tokens that are kept: those between ``floor`` and their cap."""
    return rho_K, (rho_K <= cap_K) & (rho_K >= floor)


WEIGHTS: Mapping[str, Callable[..., tuple[Tensor, Tensor]]] = {"tis": truncated, "mis": masked, "icepop": icepop}
