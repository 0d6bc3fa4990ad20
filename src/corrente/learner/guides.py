"""What teachers say of a micro-batch, as the loss is given it: arrays (lessons.py) to ``TeacherBatch``s.

What the policy gives to the teachers' likeliest tokens is asked of the output layer together with the sampled ones: the same
positions, more tokens (``lessons.also``, head.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from corrente.algo.base import TeacherBatch
from corrente.learner.lessons import Said


def guides(said: Sequence[Said], student_KJ: Tensor | None, *, like: Tensor) -> tuple[TeacherBatch, ...]:
    """What the loss is given; ``student_KJ``: the policy's log-probs of ``also``, None where they were not asked for."""
    out: list[TeacherBatch] = []
    at = 0
    for one in said:
        stop = at + one.top_ids_KJ.shape[1]
        out.append(
            TeacherBatch(
                weight_K=torch.as_tensor(one.weight_K, dtype=like.dtype, device=like.device),
                logprobs_K=torch.as_tensor(one.logprobs_K, dtype=like.dtype, device=like.device),
                top_KJ=torch.as_tensor(one.top_logprobs_KJ, dtype=like.dtype, device=like.device),
                student_KJ=None if student_KJ is None else student_KJ[:, at:stop],
            )
        )
        at = stop
    return tuple(out)
