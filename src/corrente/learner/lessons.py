"""What teachers say of a micro-batch, laid flat. numpy only.

Shapes: K trained tokens of a micro-batch, J likeliest tokens of one teacher. A row that a teacher says nothing of has weight 0 at
its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from corrente.data.types import Floats, Row, Tokens


class Said(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One teacher's lessons: weight and log-prob per trained token (K,), its likeliest tokens and their log-probs (K, J)."""

    teacher: str
    weight_K: Floats
    logprobs_K: Floats
    top_ids_KJ: Tokens
    top_logprobs_KJ: Floats


def gathered(rows: Sequence[Row], where: Sequence[NDArray[np.int64]]) -> tuple[Said, ...]:
    """A ``Said`` per teacher of any of ``rows``, by name; ``where`` are the trained places of each row."""
    names = sorted({lesson.teacher for row in rows for lesson in row.lessons})
    return tuple(_said(name, rows, where) for name in names)


def also(said: Sequence[Said]) -> Tokens | None:
    """The likeliest tokens of all teachers side by side (K, J of all); None where there are none."""
    found = [one.top_ids_KJ for one in said if one.top_ids_KJ.shape[1]]
    return np.concatenate(found, 1) if found else None


def mean_logprobs(said: Sequence[Said], count: int) -> NDArray[np.float64]:
    """Weighted mean over the teachers of what they give to each trained token (``count``,); NaN where none says anything."""
    total_K, weight_K = np.zeros(count), np.zeros(count)
    for one in said:
        spoken_K = one.weight_K > 0
        total_K += np.where(spoken_K, one.weight_K * one.logprobs_K, 0.0)
        weight_K += one.weight_K
    return np.divide(total_K, weight_K, out=np.full(count, np.nan), where=weight_K > 0)


def _said(name: str, rows: Sequence[Row], where: Sequence[NDArray[np.int64]]) -> Said:
    counts = [len(at) for at in where]
    lessons = [next((lesson for lesson in row.lessons if lesson.teacher == name), None) for row in rows]
    top = max(lesson.top_ids.shape[1] for lesson in lessons if lesson is not None)
    said = Said(
        teacher=name,
        weight_K=np.repeat(np.array([lesson.weight if lesson else 0.0 for lesson in lessons], np.float32), counts),
        logprobs_K=np.zeros(sum(counts), np.float32),
        top_ids_KJ=np.zeros((sum(counts), top), np.int32),
        top_logprobs_KJ=np.zeros((sum(counts), top), np.float32),
    )
    begin = 0
    for lesson, at in zip(lessons, where, strict=True):
        here = slice(begin, begin + len(at))
        begin = here.stop
        if lesson is not None:
            said.logprobs_K[here] = lesson.logprobs[at]
            said.top_ids_KJ[here] = lesson.top_ids[at]
            said.top_logprobs_KJ[here] = lesson.top_logprobs[at]
    return said
