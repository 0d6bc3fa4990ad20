"""Rows of a conversation that forked: no sampled token is lost, none counts twice, and all that is kept of it stays aligned."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from corrente.algo.graph import paths, rows
from corrente.algo.losses import PolicyObjective
from corrente.config import Algo, GrpoObjective, RunConfig
from corrente.data.routing import Routing
from corrente.data.support import Support
from corrente.data.types import TeacherLogprobs, Turn
from corrente.errors import AlignmentError
from corrente.testing import samples


def given_turn(*tokens: int, parent: int | None = None) -> Turn:
    return samples.turn(tokens, parent=parent)


def sampled_turn(*tokens: int, parent: int | None = None, version: int = 0, **kept) -> Turn:
    """The log-prob of a token is the token, negated."""
    logprobs = [-float(token) for token in tokens]
    return samples.turn(samples.completion(tokens=tokens, logprobs=logprobs, versions=version, **kept), parent=parent)


def built(*turns: Turn, oldest: int | None = None, **values):
    played = samples.episode(turns=turns, **values)
    return rows(3, played, advantages_T=np.arange(1.0, played.sampled_tokens + 1), oldest=oldest)


def test_path_is_one_row_and_given_turns_are_not_trained():
    (row,) = built(given_turn(1, 2), sampled_turn(10, 11), given_turn(5), sampled_turn(12, version=4))
    assert row.tokens.tolist() == [1, 2, 10, 11, 5, 12]
    assert row.loss_mask.tolist() == [False, False, True, True, False, True]
    assert row.advantages.tolist() == [0, 0, 1, 2, 0, 3]
    assert row.logprobs.tolist() == [0, 0, -10, -11, 0, -12]
    assert row.versions.tolist() == [0, 0, 0, 0, 0, 4]


def test_conversation_that_begins_anew_is_two_rows_each_with_its_own_tokens():
    """The template stripped token 10 from history: what was sampled before keeps its row, what follows gets another."""
    first, second = built(
        given_turn(1, 2), sampled_turn(10, 11), given_turn(1, 2, 11, 5, parent=-1), sampled_turn(12, 13, version=1)
    )
    assert first.tokens.tolist() == [1, 2, 10, 11]
    assert first.advantages.tolist() == [0, 0, 1, 2]
    assert second.tokens.tolist() == [1, 2, 11, 5, 12, 13]
    assert second.loss_mask.tolist() == [False] * 4 + [True] * 2
    assert second.advantages.tolist() == [0, 0, 0, 0, 3, 4]


def test_rows_of_one_episode_count_as_one_sequence():
    """In a mean over sequences every trained token of a forked episode weighs as if there were no fork."""
    forked = built(given_turn(1), sampled_turn(10, 11, 12), given_turn(1, 12, parent=-1), sampled_turn(13))
    (whole,) = built(given_turn(1), sampled_turn(10, 11, 12), given_turn(5), sampled_turn(13))
    assert [row.share for row in forked] == [0.75, 0.25]
    assert whole.share == 1
    for denominator in ("fixed", "effective"):
        algo = Algo(objective=GrpoObjective(), aggregation="sequence", denominator=denominator)
        objective = PolicyObjective(RunConfig(algo=algo))
        batch = samples.batch(rows=(*forked, whole), sequences=2, tokens=8)
        assert objective.row_weights(batch) == pytest.approx([1 / 8] * 3)


def test_turn_on_two_paths_is_trained_on_the_first_alone():
    turns = (
        given_turn(1),
        sampled_turn(10),
        given_turn(5, parent=1),
        sampled_turn(11, parent=2),
        given_turn(6, parent=1),
        sampled_turn(12, parent=4),
    )
    first, second = built(*turns)
    assert (first.tokens.tolist(), first.advantages.tolist()) == ([1, 10, 5, 11], [0, 1, 0, 2])
    assert (second.tokens.tolist(), second.advantages.tolist()) == ([1, 10, 6, 12], [0, 0, 0, 3])
    assert second.loss_mask.tolist() == [False, False, False, True]


def test_end_that_holds_nothing_sampled_of_its_own_is_no_row():
    assert len(built(given_turn(1), sampled_turn(10), given_turn(5, parent=1), given_turn(6, parent=1))) == 1


def test_old_tokens_are_withheld_row_by_row():
    first, second = built(
        given_turn(1), sampled_turn(10), given_turn(1, 5, parent=-1), sampled_turn(12, version=3), oldest=2
    )
    assert not first.loss_mask.any()
    assert second.loss_mask.tolist() == [False, False, True]


def test_parent_after_its_turn_is_refused():
    with pytest.raises(AlignmentError, match="turn 0 follows 1"):
        built(given_turn(1, parent=1), sampled_turn(2))


def test_teacher_logprobs_lie_along_the_row_their_turn_is_in():
    def taught(turn: int, *values: float) -> TeacherLogprobs:
        none = np.empty((len(values), 0))
        return TeacherLogprobs(
            teacher="wise",
            turn=turn,
            logprobs=np.array(values, np.float32),
            top_ids=none.astype(np.int32),
            top_logprobs=none.astype(np.float32),
        )

    first, second = built(
        given_turn(1),
        sampled_turn(10, 11),
        given_turn(1, 11, 5, parent=-1),
        sampled_turn(12),
        taught=(taught(3, -3.0), taught(1, -1.0, -2.0)),
    )
    assert first.teachers[0].logprobs.tolist() == [0, -1, -2]
    assert second.teachers[0].logprobs.tolist() == [0, 0, 0, -3]


def test_supports_stay_with_their_tokens():
    kept = Support.of([np.array([10, 4], np.int32)], vocabulary=64)
    (row,) = built(given_turn(1, 2), sampled_turn(10, support=kept), given_turn(5), sampled_turn(11, 12))
    assert row.support is not None
    assert row.support.counts.tolist() == [0, 0, 2, 0, 0, 0]
    assert row.support.ids(2).tolist() == [4, 10]


def test_experts_are_those_of_the_pass_that_read_a_token():
    """Token by token, experts of the pass over it: the sampling passes first, then what a later request says of its context."""

    def routing(context: list[int], sampled: list[int]) -> Routing:
        def shaped(values: list[int]):
            return np.array(values, np.int16).reshape(-1, 1, 1)

        return Routing(context=shaped(context), experts=shaped(sampled))

    (row,) = built(
        given_turn(1, 2),
        sampled_turn(10, 11, routing=routing([70], [71, 72])),
        given_turn(5),
        sampled_turn(12, routing=routing([90, 91, 92, 93], [94])),
    )
    assert row.experts is not None
    assert row.experts[:, 0, 0].tolist() == [70, 71, 72, 93, 94, -1]


@given(st.data())
def test_every_sampled_turn_is_trained_once(data):
    """Whatever the graph: each sampled turn is own in one path, after all of its ancestors."""
    count = data.draw(st.integers(1, 9))
    turns = []
    for at in range(count):
        parent = data.draw(st.one_of(st.none(), st.integers(-1, at - 1)))
        make = sampled_turn if data.draw(st.booleans()) else given_turn
        turns.append(make(*range(100 * at, 100 * at + data.draw(st.integers(1, 3))), parent=parent))
    found = paths(turns)
    own = [place.turn for path in found for place in path if place.own]
    assert sorted(own) == [at for at, turn in enumerate(turns) if turn.completion is not None]
    for path in found:
        for before, after in itertools.pairwise(path):
            parent = turns[after.turn].parent
            assert before.turn == (after.turn - 1 if parent is None else parent)
            assert before.stop == after.start
