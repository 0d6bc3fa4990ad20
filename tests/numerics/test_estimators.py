"""Advantage estimators, length shaping and credit against numbers worked out by hand, and the rows they end up in."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from corrente.algo import credit, estimators, gdpo, shaping
from corrente.algo.advantages import as_rewards
from corrente.algo.grouped import GroupedAlgorithm
from corrente.config import Algo, Filter, Reward, RunConfig
from corrente.data.types import Episode, Group, Sampling, StepScore
from corrente.testing import samples

TOLERANCE = 1e-6
EPS = 1e-4


def _episode(
    reward: float | None,
    *lengths: int,
    index: int = 0,
    scores: dict[str, float | None] | None = None,
    steps: tuple[StepScore, ...] = (),
) -> Episode:
    """A prompt, then a completion per length with a given token between them."""
    turns: list[Any] = [(1, 2)]
    for length in lengths or (2,):
        turns += [samples.completion(tokens=range(5, 5 + length)), (3,)]
    return samples.episode(index=index, turns=turns, reward=reward, scores=scores or {}, step_scores=steps)


def _group(*episodes: Episode, number: int = 0) -> Group:
    return samples.group(id=number, episodes=episodes)


def _algorithm(algo: Algo, *, filters: Filter | None = None, max_tokens: int = 10, weights=()) -> GroupedAlgorithm:
    return GroupedAlgorithm(
        RunConfig(
            algo=algo,
            filter=filters or Filter(),
            sampling=Sampling(max_tokens=max_tokens),
            reward=Reward(weights=weights),
        )
    )


def _advantages(algo: Algo, *groups: Group, **settings) -> list[list[float]]:
    """Advantage of the trained tokens of each row."""
    settings = {"filters": Filter(zero_variance="keep")} | settings
    batch = _algorithm(algo, **settings).batch(groups, step=0, version=0, oldest_trainable=[None] * len(groups))
    return [row.advantages[row.loss_mask].tolist() for row in batch.rows]


# ---- formulas -----------------------------------------------------------------------------------------------------------------


def test_batch_scale_divides_by_the_spread_of_the_step():
    """1, 0 | 1, 1: centred 1/2, -1/2 | 0, 0. All four: mean 3/4, squared distances 3/4, divided by 3, root 1/2."""
    got = estimators.batch_grpo([as_rewards([1, 0]), as_rewards([1, 1])], tolerance=TOLERANCE)
    np.testing.assert_allclose(np.concatenate(got), np.array([0.5, -0.5, 0, 0]) / (0.5 + EPS), rtol=1e-6)


def test_reinforce_pp_has_no_group_baseline():
    """The group of two successes is above the step's mean of 3/4."""
    got = estimators.reinforce_pp([as_rewards([1, 0]), as_rewards([1, 1])], tolerance=TOLERANCE)
    np.testing.assert_allclose(np.concatenate(got), np.array([0.25, -0.75, 0.25, 0.25]) / (0.5 + EPS), rtol=1e-6)


def test_reinforce_pp_baseline_centres_then_scales():
    """Centred 1/2, -1/2, 0, 0: squares 1/2, divided by 3."""
    got = estimators.reinforce_pp_baseline([as_rewards([1, 0]), as_rewards([1, 1])], tolerance=TOLERANCE)
    np.testing.assert_allclose(np.concatenate(got), np.array([0.5, -0.5, 0, 0]) / (math.sqrt(1 / 6) + EPS), rtol=1e-6)


def test_maxrl_divides_by_the_mean():
    """1, 0, 0, 0: mean 1/4. A success of a hard prompt weighs 3, its failures 1."""
    np.testing.assert_allclose(estimators.maxrl(as_rewards([1, 0, 0, 0]), tolerance=TOLERANCE), [3, -1, -1, -1])


def test_maxrl_without_success_teaches_nothing():
    assert estimators.maxrl(as_rewards([-1, 0, 1]), tolerance=TOLERANCE).tolist() == [0, 0, 0]


def test_opo_weighs_the_baseline_by_length():
    """Rewards 1 and 0 of lengths 3 and 1: baseline 3/4."""
    got = estimators.opo(as_rewards([1, 0, None]), np.array([3, 1, 9]), tolerance=TOLERANCE)
    np.testing.assert_allclose(got, [0.25, -0.75, 0])
    got = estimators.opo(as_rewards([1, 0]), np.array([0, 0]), tolerance=TOLERANCE)
    np.testing.assert_allclose(got, [0.5, -0.5])


def test_gdpo_tells_apart_what_a_sum_does_not():
    """(1, 0), (0, 1) and (0, 0), the second function on a scale of 100: both ones count alike."""
    table = np.array([[1.0, 0.0], [0.0, 100.0], [0.0, 0.0]])
    (got,) = gdpo.gdpo([table], weights=[1.0, 1.0], tolerance=TOLERANCE)
    assert got[0] == pytest.approx(got[1], rel=1e-3)
    assert got.sum() == pytest.approx(0, abs=1e-6)
    first = (2 / 3) / (math.sqrt(1 / 3) + EPS) + (-1 / 3) / (math.sqrt(1 / 3) + EPS)
    third = -2 * (1 / 3) / (math.sqrt(1 / 3) + EPS)
    spread = np.std([first, first, third], ddof=1)
    assert got[0] == pytest.approx(first / (spread + EPS), rel=1e-3)


def test_gdpo_leaves_out_what_does_not_apply():
    table = np.array([[1.0, np.nan], [0.0, np.nan], [np.nan, np.nan]])
    (got,) = gdpo.gdpo([table], weights=[1.0, 5.0], tolerance=TOLERANCE)
    assert got[2] == 0
    assert got[0] == -got[1] > 0


@pytest.mark.parametrize("name", [*estimators.ESTIMATORS])
@given(rewards=st.lists(st.lists(st.floats(0, 100) | st.none(), max_size=6), min_size=1, max_size=3))
def test_every_estimator_is_finite_and_gives_nothing_for_nothing(name, rewards):
    groups = [as_rewards(group) for group in rewards]
    got = estimators.ESTIMATORS[name](groups, [np.ones(len(g), np.int64) for g in groups], "group", TOLERANCE)
    for group, advantages in zip(rewards, got, strict=True):
        assert np.isfinite(advantages).all()
        assert all(a == 0 for a, r in zip(advantages, group, strict=True) if r is None)


@pytest.mark.parametrize("name", [*estimators.ESTIMATORS])
def test_float_noise_is_not_blown_up(name):
    noise = [as_rewards([0.5, 0.5 + 1e-7, 0.5])]
    assert estimators.ESTIMATORS[name](noise, [np.array([1, 2, 3])], "group", TOLERANCE)[0].tolist() == [0, 0, 0]


# ---- length ------------------------------------------------------------------------------------------------------------------


def test_overlong_falls_over_the_last_tokens():
    assert shaping.overlong(np.array([0, 6, 8, 10, 14]), buffer=4, longest=10).tolist() == [0, 0, -0.5, -1, -1]


def test_shaped_rewards_are_in_the_baseline_too():
    """Equal rewards, lengths 10 and 6 of 10: -1 and 0 around their own mean."""
    group = _group(_episode(1.0, 10), _episode(1.0, 6))
    algo = Algo(overlong_tokens=4, scale_rewards="none")
    assert [set(row) for row in _advantages(algo, group)] == [{-0.5}, {0.5}]
    assert _algorithm(algo).trainable(group) == ""
    assert _algorithm(Algo()).trainable(group) == "all rewards equal"


def test_equal_lengths_change_nothing():
    group = _group(_episode(1.0, 9), _episode(0.0, 9))
    for settings in ({"overlong_tokens": 4}, {"length_penalty": 0.7}):
        assert _advantages(Algo(**settings), group) == _advantages(Algo(), group)


def test_length_penalty_by_hand():
    got = shaping.shaped(as_rewards([1, None, 1]), np.array([5, 5, 20]), algo=Algo(length_penalty=0.5), longest=10)
    np.testing.assert_allclose(got, [0.75, np.nan, 0.5])


# ---- credit -------------------------------------------------------------------------------------------------------------------


def test_steps_are_credited_to_all_that_led_to_them():
    """Steps 1 and 0 in one episode, 0 in the other: mean 1/3, std sqrt(1/3)."""
    first = _episode(None, 5, steps=(StepScore(1, 0, 2, 1.0), StepScore(1, 2, 4, 0.0)))
    second = _episode(None, 3, steps=(StepScore(1, 0, 3, 0.0),))
    std = math.sqrt(1 / 3) + EPS
    good, bad = (2 / 3) / std, (-1 / 3) / std
    got = credit.by_step([first, second], scale=True, tolerance=TOLERANCE)
    np.testing.assert_allclose(got[0], [good + bad, good + bad, bad, bad, 0], rtol=1e-6)
    np.testing.assert_allclose(got[1], [bad] * 3, rtol=1e-6)


def test_steps_of_later_turns_reach_back_to_earlier_ones():
    """Turn 3 is the second completion; its step's share falls on the first as well."""
    first, second = (_episode(None, 2, 2, steps=(StepScore(3, 0, 1, score),)) for score in (1.0, 0.0))
    got = credit.by_step([first, second], scale=False, tolerance=TOLERANCE)
    assert got[0].tolist() == [0.5, 0.5, 0.5, 0]


def test_turns_are_compared_with_the_same_turn_of_the_others():
    """First turns 1, 0: +1, -1. The second turn of one alone has nothing to compare with."""
    first = _episode(None, 2, 1, steps=(StepScore(1, 0, 2, 1.0), StepScore(3, 0, 1, 5.0)))
    second = _episode(None, 3, steps=(StepScore(1, 0, 3, 0.0),))
    got = credit.by_turn([first, second], scale=True, tolerance=TOLERANCE)
    assert got[0].tolist() == [1, 1, 0]
    assert got[1].tolist() == [-1, -1, -1]


def test_credit_adds_to_the_outcome_and_lands_on_the_right_tokens():
    first = _episode(1.0, 2, 1, steps=(StepScore(1, 0, 2, 1.0),))
    second = _episode(0.0, 2, 1, steps=(StepScore(1, 0, 2, 0.0),))
    got = _advantages(Algo(credit="turn", scale_rewards="none"), _group(first, second))
    assert got == [[1.5, 1.5, 0.5], [-1.5, -1.5, -0.5]]
    algorithm = _algorithm(Algo(credit="turn", scale_rewards="none"))
    (row, _) = algorithm.batch([_group(first, second)], step=0, version=0, oldest_trainable=[None]).rows
    assert row.tokens.tolist() == [1, 2, 5, 6, 3, 5, 3]
    assert row.advantages.tolist() == [0, 0, 1.5, 1.5, 0, 0.5, 0]


def test_steps_alone_are_a_signal_if_they_are_asked_for():
    pair = _group(*(_episode(None, 2, steps=(StepScore(1, 0, 2, score),)) for score in (1.0, 0.0)))
    assert _algorithm(Algo()).trainable(pair) == "no reward"
    assert _algorithm(Algo(credit="step")).trainable(pair) == ""
    same = _group(*(_episode(1.0, 2, steps=(StepScore(1, 0, 2, 0.5),)) for _ in range(2)))
    assert _algorithm(Algo(credit="step")).trainable(same) == "all rewards equal"
    differ = _group(*(_episode(1.0, 2, steps=(StepScore(1, 0, 2, score),)) for score in (1.0, 0.0)))
    assert _algorithm(Algo(credit="turn")).trainable(differ) == ""


# ---- rows ----------------------------------------------------------------------------------------------------------------------


def test_gdpo_reads_scores_by_name_and_weighs_them():
    group = _group(
        _episode(1.0, scores={"a": 1.0, "b": 0.0}),
        _episode(1.0, scores={"a": 0.0, "b": 1.0}),
        _episode(0.0, scores={"a": 0.0, "b": 0.0}),
    )
    algorithm = _algorithm(Algo(advantage="gdpo"), weights=(1.0, 0.0))
    got = [a[0][0] for a in [algorithm.advantages([group.episodes])[0]]]
    assert got[0] > 0
    only_a = [values[0] for values in algorithm.advantages([group.episodes])[0]]
    assert only_a[1] == only_a[2] < 0 < only_a[0]
    assert _algorithm(Algo(advantage="gdpo")).trainable(group) == ""
    same_sum = _group(_episode(1.0, scores={"a": 1.0, "b": 0.0}), _episode(1.0, scores={"a": 0.0, "b": 1.0}))
    assert _algorithm(Algo()).trainable(same_sum) == "all rewards equal"
    assert _algorithm(Algo(advantage="gdpo")).trainable(same_sum) == ""


def test_gdpo_scales_what_an_environment_gave_as_one_more_score_of_weight_one():
    """An episode in another environment has its score under another name, and none under this one."""
    table = np.array([[2.0, np.nan, 0.0], [4.0, np.nan, 1.0], [np.nan, 7.0, 0.0], [np.nan, 9.0, 0.0]])
    given = ({"Nim": 2.0}, {"Nim": 4.0}, {"Chess": 7.0}, {"Chess": 9.0})
    episodes = [
        msgspec.structs.replace(_episode(1.0, scores={**env, "f": score}), env_rewards=env)
        for env, score in zip(given, table[:, 2].tolist(), strict=True)
    ]
    (want,) = gdpo.gdpo([table], weights=[1.0, 1.0, 3.0], tolerance=TOLERANCE)
    got = _algorithm(Algo(advantage="gdpo"), weights=(3.0,)).advantages([episodes])[0]
    assert [values[0] for values in got] == pytest.approx(want.tolist())


def test_reinforce_pp_trains_groups_of_one_and_of_equals():
    algorithm = _algorithm(Algo(advantage="reinforce_pp"))
    assert algorithm.trainable(_group(_episode(1.0))) == ""
    assert algorithm.trainable(_group(_episode(1.0), _episode(1.0))) == ""
    assert algorithm.trainable(_group(_episode(None))) == "no reward"
    assert algorithm.trainable(_group()) == "no survivor"


@pytest.mark.parametrize(
    ("algo", "rows"),
    [
        ({}, 2),
        ({"beta": 0.1}, 3),
        ({"entropy_coef": 0.1}, 3),
        ({"loss": "kimi_k15"}, 3),
        ({"loss": "bnpo"}, 3),
        ({"denominator": "effective"}, 3),
    ],
)
def test_rows_without_advantage_stay_where_they_have_a_gradient(algo, rows):
    """1, 0 and the mean of both."""
    group = _group(_episode(1.0), _episode(0.0), _episode(0.5))
    batch = _algorithm(Algo(**algo)).batch([group], step=0, version=0, oldest_trainable=[None])
    assert len(batch.rows) == rows
    assert batch.sequences == 3


def test_scores_of_steps_survive_a_withheld_beginning():
    """Tokens too old to train on lose their advantage; those that stay keep theirs."""
    turns = [(1, 2), samples.completion(versions=(0, 0, 3, 3)), (3,)]
    mixed = samples.episode(turns=turns, reward=1.0, step_scores=(StepScore(1, 0, 4, 1.0),))
    group = _group(mixed, _episode(0.0, 4))
    algorithm = _algorithm(Algo(credit="step", scale_rewards="none"))
    row = algorithm.batch([group], step=0, version=4, oldest_trainable=[2]).rows[0]
    assert row.loss_mask.tolist() == [False, False, False, False, True, True, False]
    assert row.advantages.tolist() == [0, 0, 0, 0, 0.5, 0.5, 0]
