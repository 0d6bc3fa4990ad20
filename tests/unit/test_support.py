"""Kept sets and experts: nothing is lost in storing, joining and sending them, and what does not line up is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from corrente.common import serialization
from corrente.data.routing import UNKNOWN, Routing, join_routings
from corrente.data.support import Support, join_supports
from corrente.data.types import Completion
from corrente.errors import AlignmentError
from corrente.runtime import wire
from corrente.testing import samples

vocabularies = st.sampled_from([1, 31, 32, 33, 100, 1000])


@st.composite
def supports(draw: st.DrawFn, vocabulary: int | None = None) -> tuple[Support, list[list[int] | None]]:
    size = draw(vocabularies) if vocabulary is None else vocabulary
    sets = draw(st.lists(st.none() | st.sets(st.integers(0, size - 1), min_size=1), max_size=6))
    lists = [None if one is None else sorted(one) for one in sets]
    arrays = [None if one is None else np.array(one[::-1], np.int32) for one in lists]
    return Support.of(arrays, vocabulary=size), lists


def listed(support: Support) -> list[list[int] | None]:
    return [support.ids(at).tolist() if support.counts[at] else None for at in range(len(support))]


@given(supports())
def test_support_gives_back_every_set(made: tuple[Support, list[list[int] | None]]):
    support, sets = made
    assert listed(support) == sets
    assert all(
        support.ids(at).tolist() == list(range(support.vocabulary)) for at, one in enumerate(sets) if one is None
    )


@given(supports())
def test_set_takes_its_ids_or_a_bitmap_whichever_is_smaller(made: tuple[Support, list[list[int] | None]]):
    support, sets = made
    most = -(-support.vocabulary // 32)
    assert len(support.words) == sum(min(len(one), most) for one in sets if one is not None)


@given(st.data())
def test_supports_join_and_are_taken_apart_again(data: st.DataObject):
    size = data.draw(vocabularies)
    (one, first), (two, second) = data.draw(supports(size)), data.draw(supports(size))
    joined = one.then(two)
    assert listed(joined) == first + second
    places = data.draw(st.lists(st.integers(0, len(joined) - 1), max_size=8)) if len(joined) else []
    assert listed(joined.take(np.array(places, np.int64))) == [(first + second)[at] for at in places]


@given(supports(), st.data())
def test_support_knows_which_tokens_it_holds(made: tuple[Support, list[list[int] | None]], data: st.DataObject):
    support, sets = made
    tokens = [data.draw(st.integers(0, support.vocabulary - 1)) for _ in sets]
    held = [one is None or token in one for token, one in zip(tokens, sets, strict=True)]
    assert support.holds(np.array(tokens, np.int32)).tolist() == held


@given(supports())
def test_completion_with_what_is_kept_crosses_the_wire_and_a_checkpoint(
    made: tuple[Support, list[list[int] | None]],
):
    support, _ = made
    count = len(support)
    sent = samples.completion(
        tokens=[support.ids(at)[0] for at in range(count)],
        support=support,
        routing=Routing(
            experts=np.arange(count * 6, dtype=np.int16).reshape(count, 3, 2), context=np.full((4, 3, 2), 7, np.int16)
        ),
    )
    for got in (
        wire.decode(wire.encode(sent), Completion),
        serialization.decode(serialization.encode(sent), Completion),
    ):
        assert got.support is not None
        assert got.routing is not None
        assert sent.routing is not None
        assert listed(got.support) == listed(support)
        assert np.array_equal(got.routing.experts, sent.routing.experts)
        assert np.array_equal(got.routing.context, sent.routing.context)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Support.of([np.array([], np.int32)], vocabulary=9), "kept set is empty"),
        (lambda: Support.of([np.array([9], np.int32)], vocabulary=9), "outside the vocabulary"),
        (
            lambda: Support(vocabulary=9, counts=np.array([2], np.int32), words=np.array([1, 2, 3], np.int32)),
            "do not line up",
        ),
        (
            lambda: Support(vocabulary=9, counts=np.array([10], np.int32), words=np.array([1], np.int32)),
            "a kept set of 10",
        ),
        (lambda: Support.whole(1, vocabulary=9).then(Support.whole(1, vocabulary=8)), "cannot be joined"),
        (
            lambda: join_supports([Support.whole(1, vocabulary=9), Support.whole(1, vocabulary=8)], [1, 1]),
            "cannot be joined",
        ),
        (lambda: Routing(experts=np.zeros((2, 3, 2), np.int16), context=np.zeros((1, 3, 1), np.int16)), "differ"),
        (lambda: completion(3, support=Support.whole(2, vocabulary=9)), "3 tokens but 2 kept sets"),
        (lambda: completion(3, routing=routing(2)), "3 tokens but experts of 2"),
        (
            lambda: completion(1, support=Support.of([np.array([5], np.int32)], vocabulary=9)),
            "not in the set of 1 it was drawn from",
        ),
    ],
)
def test_supports_and_routings_that_do_not_line_up_are_refused(make, words: str):
    with pytest.raises(AlignmentError, match=words):
        make()


def routing(tokens: int, *, context: int = 2, value: int = 1) -> Routing:
    return Routing(experts=np.full((tokens, 3, 2), value, np.int16), context=np.full((context, 3, 2), value, np.int16))


def completion(tokens: int, **kept) -> Completion:
    return samples.completion(tokens=[0] * tokens, **kept)


def test_part_without_sets_counts_as_the_whole_vocabulary():
    cut = completion(2, support=Support.of([np.array([0, 3], np.int32)] * 2, vocabulary=9))
    joined = completion(1).then(cut).then(completion(0)).support
    assert joined is not None
    assert listed(joined) == [None, [0, 3], [0, 3]]
    assert completion(1).then(completion(2)).support is None


def test_experts_of_a_resumed_completion_keep_the_context_of_its_first_request():
    whole = completion(2, routing=routing(2)).then(completion(3, routing=routing(3, context=4, value=5)))
    assert whole.routing is not None
    assert whole.routing.experts[:, 0, 0].tolist() == [1, 1, 5, 5, 5]
    assert whole.routing.context[:, 0, 0].tolist() == [1, 1]


def test_experts_that_a_part_does_not_say_are_unknown():
    late = join_routings(None, routing(1, context=4, value=5), tokens=2, more=1)
    assert late is not None
    assert late.experts[:, 0, 0].tolist() == [UNKNOWN, UNKNOWN, 5]
    assert len(late.context) == 0
    first = join_routings(None, routing(1, context=4, value=5), tokens=0, more=1)
    assert first is not None
    assert len(first.context) == 4
    early = join_routings(routing(1), None, tokens=1, more=2)
    assert early is not None
    assert early.experts[:, 0, 0].tolist() == [1, UNKNOWN, UNKNOWN]
    with pytest.raises(AlignmentError, match="cannot be joined"):
        join_routings(routing(1), _narrow(), tokens=1, more=1)


def _narrow() -> Routing:
    return Routing(experts=np.zeros((1, 3, 1), np.int16), context=np.zeros((0, 3, 1), np.int16))


def test_row_with_what_is_kept_crosses_the_wire():
    row = samples.row(
        tokens=range(4),
        prompt_tokens=2,
        support=Support.of([None, None, np.array([2, 5], np.int32), np.array([3], np.int32)], vocabulary=9),
        experts=np.arange(16, dtype=np.int16).reshape(4, 2, 2),
    )
    (data,) = wire.Frames().feed(wire.frame(wire.Rpc(1, wire.StepRpc(batch=samples.batch(rows=[row])))))
    call: wire.Rpc = wire.decode(data, wire.Rpc)
    assert isinstance(call.body, wire.StepRpc)
    (got,) = call.body.batch.rows
    assert got.support is not None
    assert listed(got.support) == [None, None, [2, 5], [3]]
    assert got.experts is not None
    assert np.array_equal(got.experts, np.arange(16).reshape(4, 2, 2))
