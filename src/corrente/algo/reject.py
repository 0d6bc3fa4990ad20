"""Whole sequences that are too far from the policy that sampled them teach nothing. Shapes: K trained tokens, flat.

With l_t = log pi(y_t) - log mu(y_t) and T tokens in the row, a token is left out where

    veto    any t of its row has l_t < log(veto)           one token the policy would not have written spoils what follows it
    band    the statistic of its row is outside [low, high]
              geometric  exp(mean l)          product  exp(sum l)
              k2         mean l^2 / 2         k3       mean (e^l - 1 - l)             both estimate KL(mu || pi), 0 at l = 0
    off-policy sequence mask (OPSM)                        DeepSeek-V3.2, arXiv:2512.02556, equation 9
            its advantage is negative and mean(-l) > threshold

Veto and bands: Liu et al. 2025, "When speed kills stability", as in verl's rollout correction. Every statistic is of all trained
tokens of the row, those other rules leave out included; so the order of these rules does not matter. Degenerate cases:
l = 0 is kept by all, if a geometric or product band contains 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from corrente.algo import ratio
from corrente.algo.rows import TrainingRows

STATISTICS: Mapping[str, Callable[[Tensor, TrainingRows], Tensor]] = {
    "geometric": lambda log_K, rows: ratio.geometric(log_K, rows).exp(),
    "product": lambda log_K, rows: ratio.product(log_K, rows).exp(),
    "k2": lambda log_K, rows: rows.mean(log_K.square() / 2),
    "k3": lambda log_K, rows: rows.mean(log_K.exp() - 1 - log_K),
}


def veto(log_ratio_K: Tensor, rows: TrainingRows, *, least: float) -> Tensor:
    """The tokens (K,) that the veto keeps: of rows in which no ratio is below ``least``."""
    return ~rows.any(log_ratio_K < math.log(least))


def band(log_ratio_K: Tensor, rows: TrainingRows, *, statistic: str, low: float, high: float) -> Tensor:
    """The tokens (K,) that the band keeps: of rows whose statistic is within ``low`` and ``high``."""
    value_K = STATISTICS[statistic](log_ratio_K, rows)
    return (value_K >= low) & (value_K <= high)


def off_policy(log_ratio_K: Tensor, advantages_K: Tensor, rows: TrainingRows, *, threshold: float) -> Tensor:
    """The tokens (K,) that the off-policy sequence mask keeps."""
    return (advantages_K >= 0) | (rows.mean(-log_ratio_K) <= threshold)


def everything(log_ratio_K: Tensor) -> Tensor:
    """All tokens (K,) are kept."""
    return torch.ones_like(log_ratio_K, dtype=torch.bool)
