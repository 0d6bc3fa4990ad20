"""Advantages against numbers worked out by hand, and the rows GroupedAlgorithm makes of groups."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from corrente.algo.advantages import as_rewards, centred, is_flat
from corrente.algo.grpo import normalised
from corrente.algo.grouped import GroupedAlgorithm
from corrente.algo.rloo import leave_one_out
from corrente.config import Algo, Filter, GrpoAdvantage, RunConfig
from corrente.data.types import Completion, Episode, FinishReason, Group, Turn
from corrente.errors import AlignmentError
from corrente.testing import samples


def _completion(*ids: int, version: int = 0, finish: FinishReason = "stop") -> Completion:
    """Its log-probs are -0.1, -0.2, -0.3 and so on."""
    logprobs = [-0.1 * (at + 1) for at in range(len(ids))]
    return samples.completion(tokens=ids, versions=version, logprobs=logprobs, finish_reason=finish)


def _episode(reward: float | None, completion: Completion | None = None, **values: Any) -> Episode:
    return samples.episode(turns=[(1, 2, 3), completion or _completion(7, 8)], reward=reward, **values)


def _group(*episodes: Episode, number: int = 0) -> Group:
    return samples.group(id=number, episodes=episodes)


def _graded(*rewards: float | None) -> Group:
    return _group(*(_episode(reward, index=index) for index, reward in enumerate(rewards)))


def _algorithm(algo: Algo | None = None, **of_filter) -> GroupedAlgorithm:
    return GroupedAlgorithm(RunConfig(algo=algo or Algo(), filter=Filter(**of_filter)))


def _batch(algorithm: GroupedAlgorithm, *groups: Group, oldest: int | None = None, version: int = 0):
    return algorithm.batch(groups, step=0, version=version, oldest_trainable=[oldest] * len(groups))


# ---- formulas -------------------------------------------------------------------------------------------------------------


def test_grpo_divides_by_the_sample_standard_deviation():
    """1, 0, 0, 0: mean 1/4, squared distances 9/16 + 3/16 = 3/4, divided by 3, root: 1/2."""
    got = normalised(as_rewards([1, 0, 0, 0]), tolerance=1e-6)
    np.testing.assert_allclose(got, np.array([0.75, -0.25, -0.25, -0.25]) / (0.5 + 1e-4), rtol=1e-6)


def test_dr_grpo_only_subtracts_the_mean():
    np.testing.assert_allclose(centred(as_rewards([1, 0, 0, 0]), tolerance=1e-6), [0.75, -0.25, -0.25, -0.25])


def test_rloo_compares_with_the_mean_of_the_others():
    """4, 1, 1: against 1; against 5/2; against 5/2."""
    np.testing.assert_allclose(leave_one_out(as_rewards([4, 1, 1]), tolerance=1e-6), [3, -1.5, -1.5])


def test_missing_rewards_are_left_out_not_read_as_zero():
    np.testing.assert_allclose(leave_one_out(as_rewards([4, None, 1, 1]), tolerance=1e-6), [3, 0, -1.5, -1.5])
    np.testing.assert_allclose(centred(as_rewards([2, None, 4]), tolerance=1e-6), [-1, 0, 1])
    np.testing.assert_allclose(
        normalised(as_rewards([2, None, 4]), tolerance=1e-6),
        np.array([-1, 0, 1]) / (math.sqrt(2) + 1e-4),
        rtol=1e-6,
    )


@pytest.mark.parametrize("rewards", [[], [1.0], [None], [None, None], [1.0, None], [0.3, 0.3, 0.3], [0.1 + 0.2, 0.3]])
def test_degenerate_groups_give_zero(rewards):
    for advantages in (
        normalised(as_rewards(rewards), tolerance=1e-6),
        centred(as_rewards(rewards), tolerance=1e-6),
        leave_one_out(as_rewards(rewards), tolerance=1e-6),
    ):
        assert advantages.tolist() == [0.0] * len(rewards)


def test_float_noise_is_not_blown_up():
    noise = as_rewards([0.5, 0.5 + 1e-7, 0.5, 0.5])
    assert normalised(noise, tolerance=1e-6).tolist() == [0, 0, 0, 0]
    assert is_flat(noise, tolerance=1e-6)
    assert not is_flat(noise, tolerance=1e-8)


@given(st.lists(st.floats(-100, 100) | st.none(), max_size=12))
def test_advantages_sum_to_zero(rewards):
    for advantages in (
        normalised(as_rewards(rewards), tolerance=1e-6),
        centred(as_rewards(rewards), tolerance=1e-6),
        leave_one_out(as_rewards(rewards), tolerance=1e-6),
    ):
        assert np.isfinite(advantages).all()
        assert abs(float(advantages.sum(dtype=np.float64))) <= 1e-6 * (1 + float(np.abs(advantages).sum()))


# ---- which groups teach ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("group", "reason"),
    [
        (_graded(1, 0), ""),
        (_graded(1, None, 0), ""),
        (_graded(1, 1, 1), "all rewards equal"),
        (_graded(0.5, 0.5 + 1e-7), "all rewards equal"),
        (_graded(None, None), "no reward"),
        (_graded(1, None), "one reward"),
        (_graded(1), "one survivor"),
        (_graded(), "no survivor"),
        (_group(_episode(1), _episode(0, status="failed")), "one survivor"),
        (_group(_episode(1, _completion()), _episode(0, _completion())), "nothing sampled that may be trained on"),
    ],
)
def test_trainable_gives_the_reason(group, reason):
    assert _algorithm().trainable(group) == reason


@pytest.mark.parametrize("mode", ["skip", "keep"])
def test_equal_rewards_are_no_reason_unless_replaced(mode):
    assert _algorithm(zero_variance=mode).trainable(_graded(1, 1)) == ""


def test_group_of_truncated_completions_teaches_nothing_when_they_are_masked():
    cut = _completion(7, 8, finish="length")
    group = _group(_episode(1, cut), _episode(0, cut))
    assert _algorithm(Algo(mask_truncated=True)).trainable(group) == "nothing sampled that may be trained on"
    assert _algorithm().trainable(group) == ""


# ---- rows -----------------------------------------------------------------------------------------------------------------


def test_rows_align_tokens_with_what_was_recorded():
    batch = _batch(
        _algorithm(Algo(advantage=GrpoAdvantage(scale_rewards="none"))),
        _group(_episode(1, _completion(7, 8, 2, version=4)), _episode(0)),
        version=5,
    )
    row = batch.rows[0]
    assert row.tokens.tolist() == [1, 2, 3, 7, 8, 2]
    assert row.loss_mask.tolist() == [False, False, False, True, True, True]
    np.testing.assert_allclose(row.logprobs, [0, 0, 0, -0.1, -0.2, -0.3], rtol=1e-6)
    assert row.versions.tolist() == [0, 0, 0, 4, 4, 4]
    assert row.advantages.tolist() == [0, 0, 0, 0.5, 0.5, 0.5]
    assert batch.lags().tolist() == [1, 1, 1, 5, 5]


def test_conversation_trains_what_the_policy_said_and_nothing_else():
    turns = [
        (1,),
        _completion(10, 11, version=1),
        samples.turn((5, 6), speaker="tool"),
        _completion(12, version=2),
    ]
    long = samples.episode(turns=turns, reward=1)
    row = _batch(_algorithm(), _group(long, _episode(0))).rows[0]
    assert row.tokens.tolist() == [1, 10, 11, 5, 6, 12]
    assert row.loss_mask.tolist() == [False, True, True, False, False, True]
    assert row.versions.tolist() == [0, 1, 1, 0, 0, 2]


def test_failed_and_unrewarded_episodes_are_not_trained():
    failed, unrewarded = _episode(5, status="failed"), _episode(None, _completion(9, 9, 9))
    batch = _batch(
        _algorithm(Algo(advantage=GrpoAdvantage(scale_rewards="none"))),
        _group(_episode(1), failed, unrewarded, _episode(0)),
    )
    assert [row.advantages[-1] for row in batch.rows] == [0.5, -0.5]
    assert batch.sequences == 3
    assert batch.tokens == 2 + 3 + 2


def test_truncated_completions_are_masked_but_stay_in_baseline_and_length():
    cut = _completion(7, 8, 9, finish="length")
    group = _group(_episode(0, cut), _episode(1), _episode(0.5))
    masked = _batch(_algorithm(Algo(mask_truncated=True, advantage=GrpoAdvantage(scale_rewards="none"))), group)
    kept = _batch(_algorithm(Algo(advantage=GrpoAdvantage(scale_rewards="none"))), group)
    assert [row.advantages[-1] for row in masked.rows] == [0.5]  # 0.5 is the mean: that row has no gradient
    assert [row.advantages[-1] for row in kept.rows] == [-0.5, 0.5]
    assert (masked.sequences, masked.tokens) == (kept.sequences, kept.tokens) == (3, 7)


def test_old_tokens_are_withheld_and_their_reward_stays_in_the_baseline():
    mixed = samples.completion(tokens=(7, 8, 9), versions=(2, 3, 3))
    old = _completion(5, 5, version=1)
    algorithm = _algorithm(Algo(advantage=GrpoAdvantage(scale_rewards="none")))
    batch = _batch(algorithm, _group(_episode(1, mixed), _episode(0, old)), oldest=3, version=4)
    (row,) = batch.rows
    assert row.loss_mask.tolist() == [False] * 4 + [True, True]
    assert row.advantages.tolist() == [0, 0, 0, 0, 0.5, 0.5]
    assert batch.tokens == 5


def test_zero_advantage_rows_are_left_out_but_counted():
    batch = _batch(_algorithm(zero_variance="skip"), _graded(1, 1), _graded(1, 0), _graded(2, 1, 0))
    assert [row.group for row in batch.rows] == [0, 0, 0, 0]
    assert (batch.sequences, batch.tokens) == (7, 14)


@pytest.mark.parametrize(
    "algorithm", [_algorithm(zero_variance="keep"), _algorithm(Algo(beta=0.1), zero_variance="skip")]
)
def test_zero_advantage_rows_are_kept_where_they_have_a_gradient(algorithm):
    assert len(_batch(algorithm, _graded(1, 1)).rows) == 2


def test_batch_of_nothing_is_empty():
    batch = _batch(_algorithm())
    assert (batch.rows, batch.sequences, batch.tokens) == ((), 0, 0)


def test_turn_that_follows_none_before_it_is_refused():
    episode = _episode(1)
    forward = msgspec.structs.replace(episode, turns=(*episode.turns, samples.turn((4,), parent=2)))
    with pytest.raises(AlignmentError, match="turn 2 follows 2"):
        _batch(_algorithm(), _group(forward, _episode(0)))


def test_turn_with_other_tokens_than_sampled_is_refused():
    turn = Turn(speaker="policy", tokens=np.array([7, 9], np.int32), completion=_completion(7, 8))
    episode = msgspec.structs.replace(_episode(1), turns=(turn,))
    with pytest.raises(AlignmentError, match="sampled"):
        _batch(_algorithm(), _group(episode, _episode(0)))
