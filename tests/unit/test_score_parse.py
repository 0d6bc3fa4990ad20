"""What reward functions and environments answer, at the edges: endless, unordered, too large, no number."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from corrente.data.types import LARGEST_REWARD
from corrente.env.base import finite_reward
from corrente.errors import RolloutError
from corrente.score.parse import parse_answer_values, parse_score


@pytest.mark.parametrize("endless", [itertools.repeat(1.0), itertools.count(), (float(n) for n in itertools.count())])
def test_endless_answer_has_the_wrong_number_of_values(endless: Any):
    readings = parse_answer_values("f", endless, count=3)
    assert [r.error for r in readings] == ["f: answered with more than 3 values for 3 completions"] * 3


def test_generator_of_the_right_length_is_an_answer():
    assert [r.score for r in parse_answer_values("f", (n / 2 for n in range(3)), count=3)] == [0.0, 0.5, 1.0]
    assert "answered with 2 values for 3" in parse_answer_values("f", iter([1.0, 2.0]), count=3)[0].error
    assert "answered with 4 values for 3" in parse_answer_values("f", [1.0] * 4, count=3)[0].error


@pytest.mark.parametrize("answer", [{5.0, 2.0}, frozenset((5.0, 2.0))])
def test_set_is_no_answer_for_it_has_no_order(answer: Any):
    assert "a list of 2 numbers or None is needed" in parse_answer_values("f", answer, count=2)[0].error


@pytest.mark.parametrize("value", [1e39, -1e308, 2 * LARGEST_REWARD])
def test_reward_is_no_larger_than_float32_can_compute_with(value: float):
    assert "a reward is at most 1e+18 in size" in parse_score("f", value).error
    with pytest.raises(RolloutError, match=r"it must be finite, and at most 1e\+18"):
        finite_reward(value, "the environment")
    assert parse_score("f", LARGEST_REWARD).score == finite_reward(LARGEST_REWARD, "the environment") == LARGEST_REWARD


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "many", None, 10**400])
def test_environment_earns_numbers(value: Any):
    with pytest.raises(RolloutError, match="the environment gave the reward"):
        finite_reward(value, "the environment")
