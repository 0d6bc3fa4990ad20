"""What teachers add to the objective, put together from reverse_kl.py and divergence.py as ``distill`` says.

    loss = sum_k a_k * w_k * ( -J_k + weight * sum_t u_tk D_tk )       J of the advantage  reward_weight * A  (+ weight * -l')

a, w: as for the policy objective (losses.py), so a token that a correction leaves out is not taught either. t: the teachers of
token k, with weight u (0 where it says nothing of the token). A token's own importance weight says how it was sampled, not how
its context was: for ``jsd``, which does not look at the token, ``staleness.correct_level`` "sequence" or "geometric" is the one
that corrects. Shapes: K trained tokens, flat; J likeliest tokens of a teacher.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from corrente.algo import divergence, reverse_kl
from corrente.algo.base import TeacherBatch, Trained
from corrente.config import Distill

Needs = Literal["", "sampled", "likeliest"]


def needs(settings: Distill) -> Needs:
    """What of the lessons the loss reads: nothing, log-probs of the sampled tokens, or of the teacher's likeliest as well."""
    if settings.loss == "none":
        return ""
    return "likeliest" if settings.loss == "jsd" else "sampled"


def advantages(part: Trained, settings: Distill, *, before_K: Tensor) -> Trained:
    """The same tokens with the advantages the policy objective is to use. ``before_K``: log-probs before the first update."""
    if settings.loss == "none":
        return part
    total_K = settings.reward_weight * part.advantages_K
    if settings.loss == "advantage":
        for teacher in part.teachers:
            gap_K = reverse_kl.log_gap(before_K.detach(), _known(teacher, before_K))
            total_K = total_K - settings.weight * teacher.weight_K * gap_K
    return replace(part, advantages_K=total_K)


def losses(part: Trained, settings: Distill, *, log_ratio_K: Tensor) -> Tensor | None:
    """weight * sum over teachers of u D per token (K,); None where the loss has no such term. ``log_ratio_K``: of the policy
    objective, token by token, differentiable."""
    if settings.loss in ("none", "advantage") or not part.teachers:
        return None
    total_K = torch.zeros_like(part.logprobs_K)
    for teacher in part.teachers:
        total_K = total_K + teacher.weight_K * _divergence(part.logprobs_K, teacher, settings, log_ratio_K)
    return settings.weight * total_K


def _divergence(logprobs_K: Tensor, teacher: TeacherBatch, settings: Distill, log_ratio_K: Tensor) -> Tensor:
    if settings.loss != "jsd":
        return reverse_kl.ESTIMATES[settings.loss](logprobs_K, _known(teacher, logprobs_K), log_ratio_K)
    assert teacher.student_KJ is not None
    speaks_K1 = teacher.weight_K[:, None] > 0
    top_KJ = torch.where(speaks_K1, teacher.top_KJ, teacher.student_KJ.detach())
    return divergence.jsd(teacher.student_KJ, top_KJ, beta=settings.beta)


def _known(teacher: TeacherBatch, logprobs_K: Tensor) -> Tensor:
    """The teacher's log-probs, and the student's own where the teacher says nothing: whatever is stored there stays out."""
    return torch.where(teacher.weight_K > 0, teacher.logprobs_K, logprobs_K.detach())
