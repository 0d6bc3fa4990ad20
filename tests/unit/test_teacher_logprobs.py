"""Log-probs of teachers, from the episode to the row and over the wire to the learner, aligned token by token."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from corrente.algo.grouped import GroupedAlgorithm
from corrente.config import RunConfig
from corrente.data.types import Batch, Group, TeacherLogprobs
from corrente.errors import AlignmentError
from corrente.runtime import wire
from corrente.testing import samples


def _taught(teacher: str, turn: int, values: list[float], *, top: int) -> TeacherLogprobs:
    count = len(values)
    return TeacherLogprobs(
        teacher=teacher,
        turn=turn,
        logprobs=np.array(values, np.float32),
        top_ids=np.arange(count * top, dtype=np.int32).reshape(count, top),
        top_logprobs=-np.arange(count * top, dtype=np.float32).reshape(count, top),
    )


def _group(*taught: TeacherLogprobs) -> Group:
    """user, policy (versions 0 and 1), tool, policy (version 1)."""
    turns = [
        (1, 2),
        samples.completion(tokens=(5, 6), versions=(0, 1)),
        samples.turn((7,), speaker="tool"),
        samples.completion(tokens=(8,), versions=1),
    ]
    return samples.group(
        episodes=[samples.episode(index=at, turns=turns, reward=float(at), taught=taught) for at in range(2)]
    )


def _batch(*taught: TeacherLogprobs, oldest: int | None = None) -> Batch:
    return GroupedAlgorithm(RunConfig()).batch([_group(*taught)], step=0, version=1, oldest_trainable=[oldest])


def _plain(one: TeacherLogprobs) -> dict[str, Any]:
    return {"teacher": one.teacher, "logprobs": one.logprobs.tolist(), "top": one.top_ids.tolist()}


def test_teacher_logprobs_lie_along_the_row_and_cross_to_the_learner():
    wise = (_taught("wise", 1, [-1, -2], top=1), _taught("wise", 3, [-3], top=1))
    stern = (_taught("stern", 3, [-9], top=0), _taught("stern", 1, [-7, -8], top=0))
    batch = _batch(*wise, *stern)
    there = wire.decode(wire.encode(wire.StepRpc(batch=batch)), wire.StepRpc).batch
    for row in (*batch.rows, *there.rows):
        assert row.tokens.tolist() == [1, 2, 5, 6, 7, 8]
        assert [_plain(one) for one in row.teachers] == [
            {"teacher": "wise", "logprobs": [0, 0, -1, -2, 0, -3], "top": [[0], [0], [0], [1], [0], [0]]},
            {"teacher": "stern", "logprobs": [0, 0, -7, -8, 0, -9], "top": [[]] * 6},
        ]


def test_teacher_logprobs_are_zero_where_a_token_is_withheld():
    (row, _) = _batch(_taught("wise", 1, [-1, -2], top=2), _taught("wise", 3, [-3], top=2), oldest=1).rows
    (teacher,) = row.teachers
    assert teacher.logprobs.tolist() == [0, 0, 0, -2, 0, -3]
    assert teacher.top_logprobs.tolist() == [[0, 0], [0, 0], [0, 0], [-2, -3], [0, 0], [0, -1]]


def test_row_without_a_teacher_has_no_teacher_logprobs():
    assert all(row.teachers == () for row in _batch().rows)


@pytest.mark.parametrize(
    "taught",
    [
        (_taught("wise", 1, [-1, -2], top=1),),
        (_taught("wise", 1, [-1, -2], top=1), _taught("wise", 3, [-3, -4], top=1)),
        (_taught("wise", 1, [-1, -2], top=1), _taught("wise", 3, [-3], top=2)),
    ],
)
def test_teacher_logprobs_that_do_not_line_up_are_refused(taught: tuple[TeacherLogprobs, ...]):
    with pytest.raises(AlignmentError, match=r"wise says \d log-probs of the 1 tokens of turn 3"):
        _batch(*taught)


def test_row_refuses_teacher_logprobs_of_another_length():
    (row, _) = _batch(_taught("wise", 1, [-1, -2], top=1), _taught("wise", 3, [-3], top=1)).rows
    (teacher,) = row.teachers
    shorter = {name: getattr(teacher, name)[1:] for name in ("logprobs", "top_ids", "top_logprobs")}
    with pytest.raises(AlignmentError, match="of a teacher"):
        msgspec.structs.replace(row, teachers=(msgspec.structs.replace(teacher, **shorter),))
