"""The way of a teacher's log-probs from an episode to the loss. Imports no torch.

    TeacherLogprobs of a turn   a scorer's answer, in Episode.taught
    TeacherLogprobs of a row    ``align_with_row``, when the algorithm makes the rows of a step
    the same, trained tokens    ``take_positions``, when the learner packs rows into a micro-batch
    TeacherBatch                ``build_batches``, when the loss of a micro-batch is computed (distill.py)

The two types are in data/types.py (numpy) and algo/base.py (tensors). Nothing is padded on the way: whatever does not line up
with the sampled tokens raises AlignmentError. A row without an answer of some teacher has weight 0 there.

Shapes: L tokens of a row, R rows of a micro-batch, K trained tokens of it, J likeliest tokens of one teacher.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from corrente.algo.base import TeacherBatch
from corrente.data.types import Episode, Floats, Mask, TeacherLogprobs, Tokens
from corrente.errors import AlignmentError

if TYPE_CHECKING:
    from torch import Tensor

RowTeachers = tuple[TeacherLogprobs, ...]
"""One entry per teacher that answered for a row."""


def align_with_row(episode: Episode, mask: Mask, starts: Mapping[int, int]) -> RowTeachers:
    """One entry per teacher of the episode, aligned with the tokens of a row (L,), zero where ``mask`` (L,) is not set.

    ``starts``: for each sampled turn that is trained in this row, the position of its first token. Raises AlignmentError where a
    teacher leaves out a sampled token, or answers for more or fewer than were sampled.
    """
    names = dict.fromkeys(turn.teacher for turn in episode.taught)
    return tuple(_align_teacher(episode, name, mask, starts) for name in names)


def take_positions(teachers: RowTeachers, at: NDArray[np.int64]) -> RowTeachers:
    """The entries of a row at its positions ``at`` alone."""
    return tuple(
        msgspec.structs.replace(
            one, logprobs=one.logprobs[at], top_ids=one.top_ids[at], top_logprobs=one.top_logprobs[at]
        )
        for one in teachers
    )


def likeliest_tokens(teachers_R: Sequence[RowTeachers], counts_R: Sequence[int]) -> Tokens | None:
    """The likeliest tokens of all teachers, one teacher after the other (K, sum of J); None where there are none.

    ``teachers_R``: per row its entries at the trained tokens; ``counts_R``: how many trained tokens each row has.
    """
    found = [_flatten(name, teachers_R, counts_R, "top_ids") for name in _names(teachers_R)]
    found = [ids_KJ for ids_KJ in found if ids_KJ.shape[1]]
    return np.concatenate(found, 1) if found else None


def build_batches(
    teachers_R: Sequence[RowTeachers], counts_R: Sequence[int], *, student_KJ: Tensor | None, like: Tensor
) -> tuple[TeacherBatch, ...]:
    """One TeacherBatch per teacher of any row, by name, as tensors of the dtype and on the device of ``like``.

    ``student_KJ``: the policy's log-probs of ``likeliest_tokens``; None where they were not asked for. Other arguments as there.
    """
    out: list[TeacherBatch] = []
    column = 0
    for name in _names(teachers_R):
        top_KJ = like.new_tensor(_flatten(name, teachers_R, counts_R, "top_logprobs"))
        stop = column + top_KJ.shape[1]
        out.append(
            TeacherBatch(
                weight_K=like.new_tensor(_weights(name, teachers_R, counts_R)),
                logprobs_K=like.new_tensor(_flatten(name, teachers_R, counts_R, "logprobs")),
                top_KJ=top_KJ,
                student_KJ=None if student_KJ is None else student_KJ[:, column:stop],
            )
        )
        column = stop
    return tuple(out)


def mean_logprobs(teachers_R: Sequence[RowTeachers], counts_R: Sequence[int]) -> NDArray[np.float64]:
    """Weighted mean over the teachers of their log-prob of each trained token (K,); NaN where no teacher answered."""
    count = sum(counts_R)
    total_K, weight_K = np.zeros(count), np.zeros(count)
    for name in _names(teachers_R):
        own_K = _weights(name, teachers_R, counts_R)
        total_K += np.where(own_K > 0, own_K * _flatten(name, teachers_R, counts_R, "logprobs"), 0.0)
        weight_K += own_K
    return np.divide(total_K, weight_K, out=np.full(count, np.nan), where=weight_K > 0)


def _align_teacher(episode: Episode, name: str, mask: Mask, starts: Mapping[int, int]) -> TeacherLogprobs:
    by_turn = {of_turn.turn: of_turn for of_turn in episode.taught if of_turn.teacher == name}
    first = next(iter(by_turn.values()))
    top = first.top_ids.shape[1]
    aligned = TeacherLogprobs(
        teacher=name,
        weight=first.weight,
        logprobs=np.zeros(len(mask), np.float32),
        top_ids=np.zeros((len(mask), top), np.int32),
        top_logprobs=np.zeros((len(mask), top), np.float32),
    )
    for number, start in starts.items():
        turn = episode.turns[number]
        here = slice(start, start + len(turn.tokens))
        if not len(turn.tokens):
            continue
        of_turn = by_turn.get(number)
        if of_turn is None or len(of_turn.logprobs) != len(turn.tokens) or of_turn.top_ids.shape[1] != top:
            count = 0 if of_turn is None else len(of_turn.logprobs)
            raise AlignmentError(
                f"{name} says {count} log-probs of the {len(turn.tokens)} tokens of turn {number} of episode {episode.index} "
                f"of {episode.prompt_id}"
            )
        aligned.logprobs[here] = of_turn.logprobs
        aligned.top_ids[here] = of_turn.top_ids
        aligned.top_logprobs[here] = of_turn.top_logprobs
    for values in (aligned.logprobs, aligned.top_ids, aligned.top_logprobs):
        values[~mask] = 0
    return aligned


def _names(teachers_R: Sequence[RowTeachers]) -> list[str]:
    return sorted({one.teacher for of_row in teachers_R for one in of_row})


def _weights(name: str, teachers_R: Sequence[RowTeachers], counts_R: Sequence[int]) -> Floats:
    """The teacher's weight at each trained token (K,); 0 where it did not answer."""
    weights_R = [next((one.weight for one in of_row if one.teacher == name), 0.0) for of_row in teachers_R]
    return np.repeat(np.array(weights_R, np.float32), counts_R)


def _flatten(name: str, teachers_R: Sequence[RowTeachers], counts_R: Sequence[int], field: str) -> NDArray[Any]:
    """One array of a teacher over the K trained tokens, row after row; zeros where it did not answer."""
    own_R = [next((getattr(one, field) for one in of_row if one.teacher == name), None) for of_row in teachers_R]
    answered = [values for values in own_R if values is not None]
    out = np.zeros((sum(counts_R), *answered[0].shape[1:]), answered[0].dtype)
    start = 0
    for values, count in zip(own_R, counts_R, strict=True):
        if values is not None:
            out[start : start + count] = values
        start += count
    return out
