"""Groups that are not worth a place in a step: which, and the reason the ledger is given."""

from __future__ import annotations

from typing import Any

import pytest

from corrente.algo.filters import pass_rate, reason, repetition
from corrente.algo.grouped import GroupedAlgorithm
from corrente.config import Filter, RunConfig
from corrente.data.types import Episode, FinishReason
from corrente.testing import samples


def episode(
    reward: float | None = 1.0, tokens: tuple[int, ...] = (1, 2, 3), finish: FinishReason = "stop", **values: Any
) -> Episode:
    answer = samples.completion(tokens=tokens, finish_reason=finish)
    return samples.episode(turns=[answer], reward=reward, **values)


def rewarded(*rewards: float | None) -> list[Episode]:
    return [episode(reward) for reward in rewards]


def test_pass_rate_is_of_those_with_a_reward():
    assert pass_rate(rewarded(1.0, 0.0, None, 2.0, 0.99), at_least=1.0) == 0.5
    assert pass_rate(rewarded(None, None), at_least=1.0) is None


@pytest.mark.parametrize(
    ("rewards", "why"),
    [
        ((0.0, 0.0, 0.0, 1.0), ""),
        ((0.0, 0.0, 0.0, 0.0), "pass rate below filter.pass_rate_min"),
        ((1.0, 1.0, 1.0, 0.0), ""),
        ((1.0, 1.0, 1.0, 1.0), "pass rate above filter.pass_rate_max"),
        ((None, None), ""),
    ],
)
def test_too_hard_and_too_easy_groups_are_filtered(rewards: Any, why: str):
    assert reason(rewarded(*rewards), Filter(pass_rate_min=0.25, pass_rate_max=0.75)) == why
    assert reason(rewarded(*rewards), Filter()) == ""


def test_groups_cut_off_by_the_budget_are_filtered():
    half = [episode(), episode(finish="length")]
    assert reason(half, Filter(truncated_max=0.5)) == ""
    assert (
        reason([*half, episode(finish="length")], Filter(truncated_max=0.5))
        == "truncated more than filter.truncated_max"
    )


def test_repetition_is_the_part_of_ngrams_that_were_there_before():
    assert repetition(episode(tokens=tuple(range(10)))) == 0
    assert repetition(episode(tokens=(1,) * 10)) == pytest.approx(6 / 7)
    assert repetition(episode(tokens=(1, 2, 3, 4, 1, 2, 3, 4))) == pytest.approx(1 / 5)
    assert repetition(episode(tokens=())) == 0
    loop, fine = episode(tokens=(1,) * 10), episode(tokens=tuple(range(10)))
    assert reason([loop, fine], Filter(repetition_max=0.5)) == ""
    assert reason([loop, loop], Filter(repetition_max=0.5)) == "repetition above filter.repetition_max"


def test_algorithm_asks_the_filters_about_survivors_only():
    config = RunConfig(filter=Filter(pass_rate_min=0.5))
    episodes = (*rewarded(1.0, 0.0), episode(None, status="failed", error="x"))
    half, third = (samples.group(episodes=members) for members in (episodes, rewarded(0.0, 0.1, 1.0)))
    assert GroupedAlgorithm(config).trainable(half) == ""
    assert GroupedAlgorithm(config).trainable(third) == "pass rate below filter.pass_rate_min"
