"""Divergence of two next-token distributions, read at a teacher's likeliest tokens. Shapes: K tokens, J likeliest at each place.

The distributions are reduced to J + 1 outcomes: the teacher's J likeliest tokens, and all other tokens together (the tail), which
has what their probabilities leave of 1. With q of the teacher, p of the student, both reduced:

    JSD_b(q, p) = b KL(q || m) + (1 - b) KL(p || m),        m = b q + (1 - b) p        b in (0, 1)
    b = 0: KL(q || p), forward, covers what the teacher does;    b = 1: KL(p || q), reverse, keeps to what it does most

Agarwal et al. 2023, "On-policy distillation of language models" (GKD), arXiv:2306.13649, equation 1; the limits at 0 and 1 are
TRL's, whose ``beta`` this is. Reducing never makes a divergence larger, and with all tokens among the J it is that of the whole
distributions. Without the tail, renormalising over the J, the student could put any amount of probability elsewhere for free.

Degenerate cases: p = q gives exactly 0, and no gradient but rounding. A tail below ``TAIL``, which in float32 is only what
rounding left, counts as TAIL and has no gradient, so KL may come out 1e-6 below 0. Constants: ``teacher_KJ``.
"""

from __future__ import annotations

import torch
from torch import Tensor

TAIL = 1e-6
LEAST = -50.0
"""Log-probability below which tokens count alike: exp(-50) is 2e-22."""


def with_tail(top_KJ: Tensor) -> Tensor:
    """Log-probs of the J tokens and of all others together (K, J + 1), in float64."""
    top_KJ = top_KJ.double().clamp(min=LEAST)
    left_K = (1 - top_KJ.exp().sum(-1)).clamp(min=TAIL)
    return torch.cat([top_KJ, left_K.log()[:, None]], -1)


def jsd(student_KJ: Tensor, teacher_KJ: Tensor, *, beta: float) -> Tensor:
    """JSD_beta per token (K,) of log-probs of the teacher's likeliest tokens; differentiable in ``student_KJ`` alone."""
    p, q = with_tail(student_KJ), with_tail(teacher_KJ.detach())
    gap = p - q  # log of p / q; m / q and m / p follow from it without cancelling at 0
    if beta == 0:
        value_K = -(q.exp() * gap).sum(-1)
    elif beta == 1:
        value_K = (p.exp() * gap).sum(-1)
    else:
        to_teacher_K = -(q.exp() * torch.log1p((1 - beta) * torch.expm1(gap))).sum(-1)
        to_student_K = -(p.exp() * torch.log1p(beta * torch.expm1(-gap))).sum(-1)
        value_K = beta * to_teacher_K + (1 - beta) * to_student_K
    return value_K.to(student_KJ.dtype)
