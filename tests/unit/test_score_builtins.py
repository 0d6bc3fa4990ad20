"""Reward functions that are known by name, against answers worked out by hand."""

from __future__ import annotations

import pytest

from corrente.score.builtins import (
    BUILTINS,
    boxed_answer,
    exact_match,
    format_match,
    last_boxed,
    length_penalty,
    repetition_penalty,
    think_format,
)


def test_names_are_those_of_the_functions():
    assert sorted(BUILTINS) == [
        "boxed_answer",
        "exact_line",
        "exact_match",
        "format_match",
        "length_penalty",
        "reasoning_gym",
        "repetition_penalty",
        "think_format",
    ]


def test_exact_match_wants_nothing_but_the_answer():
    texts = [" 42\n", "42", "42.", "The answer is 42", ""]
    assert exact_match(texts, [42] * 5) == [1, 1, 0, 0, 0]
    assert exact_match(["Paris"], ["paris"]) == [0]
    assert exact_match(["Paris"], ["paris"], ignore_case=True) == [1]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (r"so \boxed{4}", "4"),
        (r"\boxed{3} no, \boxed{\frac{1}{2}} it is", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{}", ""),
        (r"\boxed{never closed", None),
        ("no box 4", None),
        ("", None),
    ],
)
def test_boxed_finds_the_last_box_with_its_braces(text: str, found: str | None):
    assert last_boxed(text) == found


def test_boxed_answer_compares_without_blanks():
    texts = [r"\boxed{ 1 / 2 }", r"\boxed{0.5}", "1/2", r"\boxed{1/2"]
    assert boxed_answer(texts, ["1/2"] * 4) == [1, 0, 0, 0]
    assert boxed_answer(texts, ["1/2"] * 4, missing=None) == [1, 0, None, None]


def test_format_match_is_of_the_whole_completion():
    assert format_match(["a\nb", "a\nbc", "xa\nb"], pattern="a.b") == [1, 0, 0]


@pytest.mark.parametrize(
    ("text", "fine"),
    [
        ("<think>hm\nhm</think>4", 1),
        ("\n<think></think> 4\n", 1),
        ("<think>hm</think>", 0),
        ("<think>hm</think>  \n", 0),
        ("4 <think>hm</think> 4", 0),
        ("<think>hm 4", 0),
        ("hm</think>4", 0),
        ("<think>a<think>b</think>4", 0),
        ("<think>a</think>4<think>b</think>", 0),
        ("<think>a</think>4</think>", 0),
    ],
)
def test_think_format_wants_one_closed_block_and_something_after_it(text: str, fine: float):
    assert think_format([text]) == [fine]


def test_length_penalty_falls_in_a_line():
    ids = [[0] * n for n in (0, 4, 5, 6, 8, 9)]
    assert length_penalty(ids, free=4, limit=8) == [0, 0, -0.25, -0.5, -1, -1]
    with pytest.raises(ValueError, match="free must be"):
        length_penalty(ids, free=8, limit=8)


def test_repetition_penalty_is_the_part_of_ngrams_seen_before():
    ids = [[1, 2, 3, 4], [1, 1, 1, 1], [1, 2, 1, 2, 1], [1], []]
    assert repetition_penalty(ids, n=2) == pytest.approx([0, -2 / 3, -0.5, 0, 0])
    with pytest.raises(ValueError, match="n = 0"):
        repetition_penalty(ids, n=0)
