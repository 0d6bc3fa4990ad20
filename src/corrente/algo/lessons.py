"""What teachers said of an episode, laid along the row that is trained on it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from corrente.data.types import Episode, Mask, TeacherRow
from corrente.errors import AlignmentError


def lessons(episode: Episode, mask: Mask, starts: Mapping[int, int]) -> tuple[TeacherRow, ...]:
    """One lesson per teacher, aligned with the tokens of a row (L,), zero where ``mask`` is not set. ``starts``: where in the row
    each sampled turn begins that is trained in it.

    Raises AlignmentError where a teacher leaves out a sampled token, or says more or less than was sampled: never padded.
    """
    names = list(dict.fromkeys(taught.teacher for taught in episode.taught))
    return tuple(_lesson(episode, name, mask, starts) for name in names)


def _lesson(episode: Episode, name: str, mask: Mask, starts: Mapping[int, int]) -> TeacherRow:
    by_turn = {taught.turn: taught for taught in episode.taught if taught.teacher == name}
    first = next(iter(by_turn.values()))
    top = first.top_ids.shape[1]
    lesson = TeacherRow(
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
        taught = by_turn.get(number)
        if taught is None or len(taught.logprobs) != len(turn.tokens) or taught.top_ids.shape[1] != top:
            said = 0 if taught is None else len(taught.logprobs)
            raise AlignmentError(
                f"{name} says {said} log-probs of the {len(turn.tokens)} tokens of turn {number} of episode {episode.index} "
                f"of {episode.prompt_id}"
            )
        lesson.logprobs[here] = taught.logprobs
        lesson.top_ids[here] = taught.top_ids
        lesson.top_logprobs[here] = taught.top_logprobs
    for values in (lesson.logprobs, lesson.top_ids, lesson.top_logprobs):
        values[~mask] = 0
    return lesson
