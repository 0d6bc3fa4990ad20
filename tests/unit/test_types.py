"""Data that does not line up is refused where it is made; what is derived from it is right."""

from __future__ import annotations

import itertools

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from corrente.data.types import Completion, FinishReason, Row, Span, concat_tokens
from corrente.errors import AlignmentError
from corrente.testing import samples


def build(count: int, spans: tuple[Span, ...], logprobs: int | None = None) -> Completion:
    return Completion(
        tokens=np.zeros(count, np.int32),
        logprobs=np.zeros(count if logprobs is None else logprobs, np.float32),
        spans=spans,
        finish_reason="stop",
    )


@pytest.mark.parametrize(
    "spans",
    [
        (),
        (Span(0, 0, 2),),
        (Span(0, 0, 4),),
        (Span(0, 1, 3),),
        (Span(0, 0, 1), Span(1, 2, 3)),
        (Span(0, 0, 2), Span(1, 1, 3)),
        (Span(0, 0, 0), Span(1, 0, 3)),
        (Span(0, 0, 3), Span(1, 3, 3)),
        (Span(1, 2, 3), Span(0, 0, 2)),
    ],
)
def test_spans_that_do_not_partition_the_tokens_are_refused(spans: tuple[Span, ...]) -> None:
    with pytest.raises(AlignmentError, match="do not partition"):
        build(3, spans)


def test_completions_that_line_up_are_accepted() -> None:
    assert build(0, ()).versions.tolist() == []
    assert build(3, (Span(4, 0, 1), Span(6, 1, 3))).versions.tolist() == [4, 6, 6]
    with pytest.raises(AlignmentError, match="2 log-probs"):
        build(3, (Span(0, 0, 3),), logprobs=2)


@given(st.lists(st.integers(0, 5), max_size=40))
def test_versions_and_spans_say_the_same(versions: list[int]) -> None:
    done = samples.completion(versions=versions)
    assert done.versions.tolist() == versions
    assert len(done.spans) == sum(a != b for a, b in itertools.pairwise(versions)) + bool(versions)


@pytest.mark.parametrize("name", ["loss_mask", "logprobs", "versions", "advantages"])
def test_rows_that_do_not_line_up_are_refused(name: str) -> None:
    arrays = {
        "tokens": np.zeros(4, np.int32),
        "loss_mask": np.zeros(4, bool),
        "logprobs": np.zeros(4, np.float32),
        "versions": np.zeros(4, np.int32),
        "advantages": np.zeros(4, np.float32),
    }
    Row(group=0, **arrays)
    with pytest.raises(AlignmentError, match=f"4 tokens has 3 {name}"):
        Row(group=0, **{**arrays, name: arrays[name][:3]})


def test_lags_are_those_of_trained_tokens_alone() -> None:
    row = samples.row(tokens=range(5), prompt_tokens=2, versions=(0, 0, 3, 4, 7))
    batch = samples.batch(rows=[row, row], version=7)
    assert batch.lags().tolist() == [4, 3, 0, 4, 3, 0]
    assert msgspec.structs.replace(batch, rows=()).lags().tolist() == []


def test_group_is_as_old_as_its_oldest_token() -> None:
    mixed = samples.group(
        episodes=[samples.episode(versions=(5, 6)), samples.episode(index=1, versions=(4, 4, 9))], admitted_version=1
    )
    assert mixed.oldest_version == 4
    assert samples.group(versions=(), admitted_version=3).oldest_version == 3
    assert mixed.sampled_tokens == 5
    assert samples.group(rewards=(1.0, None)).rewards == (1.0, None)


def test_episode_knows_what_was_sampled_and_what_was_given() -> None:
    played = samples.episode(versions=(0, 0))
    assert played.sampled_tokens == 2
    assert played.text == "0 1"
    assert not played.truncated
    cut = msgspec.structs.replace(played.turns[1].completion, finish_reason="length")
    truncated = msgspec.structs.replace(
        played, turns=(played.turns[0], msgspec.structs.replace(played.turns[1], completion=cut))
    )
    assert truncated.truncated
    assert samples.episode(versions=()).completions == ()


def test_concatenating_nothing_gives_no_tokens() -> None:
    assert concat_tokens([]).dtype == np.int32
    assert concat_tokens([np.array([1]), np.array([2, 3])]).tolist() == [1, 2, 3]


def test_segments_put_together_equal_one_sequence():
    tokens, versions = (5, 6, 7, 8, 9), (1, 1, 2, 2, 2)

    def segment(start: int, stop: int, reason: FinishReason) -> Completion:
        part = tokens[start:stop]
        return samples.completion(
            tokens=part,
            versions=versions[start:stop],
            logprobs=[-float(token) for token in part],
            finish_reason=reason,
            text="all of it" if reason == "stop" else "",
        )

    whole = segment(0, 5, "stop")
    for cut in range(6):
        joined = segment(0, cut, "abort").then(segment(cut, 5, "stop"))
        assert joined.tokens.tolist() == whole.tokens.tolist()
        assert joined.logprobs.tolist() == whole.logprobs.tolist()
        assert (joined.spans, joined.finish_reason, joined.text) == (whole.spans, "stop", "all of it")
        assert joined.tokens.dtype == np.int32
        assert joined.logprobs.dtype == np.float32


def test_request_goes_on_after_what_was_written_any_number_of_times():
    request = samples.request(id="a", tokens=(1, 2), seed=3, group="g")
    once = request.after(samples.completion(tokens=(5, 6)))
    twice = once.after(samples.completion(tokens=())).after(samples.completion(tokens=(7,), versions=1))
    assert (once.tokens.tolist(), once.written) == ([1, 2, 5, 6], 2)
    assert (twice.tokens.tolist(), twice.written) == ([1, 2, 5, 6, 7], 3)
    assert (twice.id, twice.seed, twice.group, twice.sampling) == ("a", 3, "g", request.sampling)
    assert request.tokens.tolist() == [1, 2]
