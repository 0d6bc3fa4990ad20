"""Reverse KL to a teacher from the tokens that were sampled. Shapes: K trained tokens, flat.

With l = log pi(y) - log q(y), q the teacher, what is minimised is KL(pi || q) at each place of the student's own text. Its
gradient E_pi[l grad log pi(y)] can be had in four ways:

    advantage   A + weight * -l'            l' of the policy before the step's first update, a constant: the policy objective does
                                            the rest, its ratio, clip and corrections included
    k1          r * l                       r = pi / p, through which gradient flows (ratio.py); unbiased
    k2          l^2 / 2                     no ratio: on stale samples only the importance weight corrects it
    k3          r * (e^-l - 1 + l)          the same gradient as k1, of less variance near q = pi

The signal is of each token alone, not of what follows it. Lu and Thinking Machines Lab 2025, "On-policy distillation",
https://thinkingmachines.ai/blog/on-policy-distillation; Gu et al. 2023, "MiniLLM", arXiv:2306.08543; estimators: kl.py.
r is not bounded: use ``advantage``, or a weight (``staleness.correct``), where samples are old.

Degenerate cases: pi = q gives l = 0, an advantage of exactly 0 and a k2 and k3 of exactly 0 without gradient; k1 is 0 too, its
gradient r grad log pi is 0 only on average. A token that the teacher did not answer for has weight 0, and the value stored there
has no effect. ``teacher_K`` is a constant.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from corrente.algo import kl
from corrente.algo.ratio import log_ratio


def log_gap(logprobs_K: Tensor, teacher_K: Tensor) -> Tensor:
    """l, held within +-20."""
    return log_ratio(logprobs_K, teacher_K)


def k1(logprobs_K: Tensor, teacher_K: Tensor, log_ratio_K: Tensor) -> Tensor:
    """r * l."""
    return torch.exp(log_ratio_K) * kl.k1(logprobs_K, teacher_K)


def k2(logprobs_K: Tensor, teacher_K: Tensor, log_ratio_K: Tensor) -> Tensor:
    """Half of l squared; ``log_ratio_K`` does not matter."""
    return kl.k2(logprobs_K, teacher_K)


def k3(logprobs_K: Tensor, teacher_K: Tensor, log_ratio_K: Tensor) -> Tensor:
    """r * (e^-l - 1 + l)."""
    return torch.exp(log_ratio_K) * kl.k3(logprobs_K, teacher_K)


ESTIMATES: Mapping[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
