"""What teachers say, from the episode to the row and over the wire to the learner, aligned token by token."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from corrente.algo.grouped import GroupedAlgorithm
from corrente.common.serialization import decode, encode
from corrente.config import RunConfig
from corrente.data.types import Batch, Completion, Episode, Group, Prompt, Span, TeacherRow, TeacherTurn, Turn
from corrente.errors import AlignmentError
from corrente.runtime import wire


def _sampled(tokens: list[int], *spans: Span) -> Completion:
    return Completion(
        tokens=np.array(tokens, np.int32),
        logprobs=np.full(len(tokens), -0.5, np.float32),
        spans=spans,
        finish_reason="stop",
    )


def _taught(teacher: str, turn: int, values: list[float], *, top: int) -> TeacherTurn:
    count = len(values)
    return TeacherTurn(
        teacher=teacher,
        turn=turn,
        logprobs=np.array(values, np.float32),
        top_ids=np.arange(count * top, dtype=np.int32).reshape(count, top),
        top_logprobs=-np.arange(count * top, dtype=np.float32).reshape(count, top),
    )


def _group(*taught: TeacherTurn) -> Group:
    """user, policy (versions 0 and 1), tool, policy (version 1)."""
    first, second = _sampled([5, 6], Span(0, 0, 1), Span(1, 1, 2)), _sampled([8], Span(1, 0, 1))
    turns = (
        Turn(speaker="user", tokens=np.array([1, 2], np.int32)),
        Turn(speaker="policy", tokens=first.tokens, completion=first, parent=0),
        Turn(speaker="tool", tokens=np.array([7], np.int32), parent=1),
        Turn(speaker="policy", tokens=second.tokens, completion=second, parent=2),
    )
    episodes = [
        Episode(prompt_id="0/0", group_id=0, index=at, turns=turns, reward=float(at), taught=taught) for at in range(2)
    ]
    prompt = Prompt(id="0/0", tokens=np.array([1, 2], np.int32))
    return Group(id=0, prompt=prompt, episodes=tuple(episodes), admitted_version=0)


def _batch(*taught: TeacherTurn, oldest: int | None = None) -> Batch:
    return GroupedAlgorithm(RunConfig()).batch([_group(*taught)], step=0, version=1, oldest_trainable=[oldest])


def _plain(lesson: TeacherRow) -> dict[str, Any]:
    return {"teacher": lesson.teacher, "logprobs": lesson.logprobs.tolist(), "top": lesson.top_ids.tolist()}


def test_lessons_lie_along_the_row_and_cross_to_the_learner():
    wise = (_taught("wise", 1, [-1, -2], top=1), _taught("wise", 3, [-3], top=1))
    stern = (_taught("stern", 3, [-9], top=0), _taught("stern", 1, [-7, -8], top=0))
    batch = _batch(*wise, *stern)
    there = decode(encode(wire.StepRpc(batch=batch)), wire.StepRpc).batch
    for row in (*batch.rows, *there.rows):
        assert row.tokens.tolist() == [1, 2, 5, 6, 7, 8]
        assert [_plain(lesson) for lesson in row.lessons] == [
            {"teacher": "wise", "logprobs": [0, 0, -1, -2, 0, -3], "top": [[0], [0], [0], [1], [0], [0]]},
            {"teacher": "stern", "logprobs": [0, 0, -7, -8, 0, -9], "top": [[]] * 6},
        ]


def test_lesson_is_zero_where_a_token_is_withheld():
    (row, _) = _batch(_taught("wise", 1, [-1, -2], top=2), _taught("wise", 3, [-3], top=2), oldest=1).rows
    (lesson,) = row.lessons
    assert lesson.logprobs.tolist() == [0, 0, 0, -2, 0, -3]
    assert lesson.top_logprobs.tolist() == [[0, 0], [0, 0], [0, 0], [-2, -3], [0, 0], [0, -1]]


def test_row_without_a_teacher_has_no_lesson():
    assert all(row.lessons == () for row in _batch().rows)


@pytest.mark.parametrize(
    "taught",
    [
        (_taught("wise", 1, [-1, -2], top=1),),
        (_taught("wise", 1, [-1, -2], top=1), _taught("wise", 3, [-3, -4], top=1)),
        (_taught("wise", 1, [-1, -2], top=1), _taught("wise", 3, [-3], top=2)),
    ],
)
def test_lesson_that_does_not_line_up_is_refused(taught: tuple[TeacherTurn, ...]):
    with pytest.raises(AlignmentError, match=r"wise says \d log-probs of the 1 tokens of turn 3"):
        _batch(*taught)


def test_row_refuses_a_lesson_of_another_length():
    (row, _) = _batch(_taught("wise", 1, [-1, -2], top=1), _taught("wise", 3, [-3], top=1)).rows
    (lesson,) = row.lessons
    with pytest.raises(AlignmentError, match="of a teacher"):
        msgspec.structs.replace(row, lessons=(msgspec.structs.replace(lesson, logprobs=lesson.logprobs[1:]),))
