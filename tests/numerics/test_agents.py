"""Several agents in one episode: what each is due, by hand, and the rows of each one's own view."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from corrente.algo import agents
from corrente.algo.advantages import StepRewards
from corrente.algo.gdpo import gdpo
from corrente.algo.grouped import GroupedAlgorithm
from corrente.algo.losses import PolicyObjective
from corrente.config import Algo, Filter, GdpoAdvantage, GrpoAdvantage, GrpoObjective, Reward, RunConfig
from corrente.controller.eval_metrics import eval_metrics
from corrente.controller.step_metrics import ScoreStats
from corrente.data.types import Episode, Group, StepScore, Turn
from corrente.testing import samples

GIVER, GUESSER = "giver", "guesser"


def _said(speaker: str, parent: int, *ids: int, version: int = 0) -> Turn:
    return samples.turn(samples.completion(tokens=ids, versions=version), speaker=speaker, parent=parent)


def _given(parent: int, *ids: int) -> Turn:
    return samples.turn(ids, parent=parent)


def _game(giver: float | None, guesser: float | None, *, index: int = 0, **values: Any) -> Episode:
    """The giver speaks twice, the guesser once in between; each has a view of its own."""
    turns = (
        _given(-1, 1, 2),
        _said(GIVER, 0, 10, 11),
        _given(-1, 3),
        _said(GUESSER, 2, 20),
        _given(1, 4),
        _said(GIVER, 4, 12),
    )
    own = {GIVER: giver, GUESSER: guesser}
    earned = {name: reward for name, reward in own.items() if reward is not None}
    return samples.episode(index=index, turns=turns, agent_rewards=earned, **values)


def _group(*episodes: Episode) -> Group:
    return samples.group(episodes=episodes)


def _algorithm(algo: Algo | None = None, **of_filter: Any) -> GroupedAlgorithm:
    return GroupedAlgorithm(
        RunConfig(algo=algo or Algo(advantage=GrpoAdvantage(scale_rewards="none")), filter=Filter(**of_filter))
    )


def test_each_agent_is_compared_with_its_own_part():
    group = _group(_game(1.0, 0.0), _game(3.0, 0.0), _game(2.0, 6.0))
    got = _algorithm().advantages([group.episodes])[0]
    # giver: mean 2 over (1, 3, 2); guesser: mean 2 over (0, 0, 6). Tokens: giver 2, guesser 1, giver 1.
    assert [list(a) for a in got] == [[-1, -1, -2, -1], [1, 1, -2, 1], [0, 0, 4, 0]]


def test_scaled_advantages_use_the_spread_of_the_part():
    group = _group(_game(1.0, 0.0), _game(3.0, 10.0))
    got = _algorithm(Algo()).advantages([group.episodes])[0]
    giver, guesser = 1 / (np.sqrt(2) + 1e-4), 5 / (np.sqrt(50) + 1e-4)
    assert got[1] == pytest.approx([giver, giver, guesser, giver], rel=1e-6)


def test_what_the_episode_earned_is_added_to_every_agents_own():
    group = _group(_game(1.0, 0.0, reward=10.0), _game(1.0, 0.0, reward=20.0))
    got = _algorithm().advantages([group.episodes])[0]
    assert [list(a) for a in got] == [[-5, -5, -5, -5], [5, 5, 5, 5]]


def test_agent_without_a_reward_is_context_and_not_trained():
    """Also where rows without advantage are kept, as with a KL."""
    group = _group(_game(1.0, None), _game(3.0, None))
    algorithm = _algorithm(Algo(advantage=GrpoAdvantage(scale_rewards="none"), beta=0.1))
    batch = algorithm.batch([group], step=0, version=0, oldest_trainable=[None])
    assert [list(row.tokens) for row in batch.rows] == [[1, 2, 10, 11, 4, 12]] * 2
    assert algorithm.trainable(group) == ""


def test_rows_are_one_per_agent_with_its_own_context():
    batch = _algorithm().batch([_group(_game(1.0, 0.0), _game(3.0, 6.0))], step=0, version=0, oldest_trainable=[None])
    first, second = batch.rows[:2]
    by_tokens = {tuple(row.tokens.tolist()): row for row in (first, second)}
    giver, guesser = by_tokens[(1, 2, 10, 11, 4, 12)], by_tokens[(3, 20)]
    assert list(giver.loss_mask) == [False, False, True, True, False, True]
    assert list(giver.advantages) == [0, 0, -1, -1, 0, -1]
    assert list(guesser.loss_mask) == [False, True]
    assert list(guesser.advantages) == [0, -3]
    assert (batch.sequences, batch.tokens) == (4, 8)


@pytest.mark.parametrize("denominator", ["fixed", "effective"])
def test_each_agent_counts_as_one_sequence_however_much_it_said(denominator: Any):
    """The giver was trained on three tokens and the guesser on one; in the second game the giver's view forked."""
    forked = samples.episode(
        index=1,
        turns=(_given(-1, 1), _said(GIVER, 0, 10, 11), _given(-1, 3), _said(GUESSER, 2, 20), *_anew(5, 12)),
        agent_rewards={GIVER: 3.0, GUESSER: 6.0},
    )
    algo = Algo(objective=GrpoObjective(), advantage=GrpoAdvantage(scale_rewards="none"), denominator=denominator)
    batch = _algorithm(algo).batch([_group(_game(1.0, 0.0), forked)], step=0, version=0, oldest_trainable=[None])
    weights = PolicyObjective(RunConfig(algo=algo)).row_weights(batch)
    counts = {
        tuple(row.tokens.tolist()): (w, int(row.loss_mask.sum())) for row, w in zip(batch.rows, weights, strict=True)
    }
    assert batch.sequences == 4
    assert counts == {
        (1, 2, 10, 11, 4, 12): (pytest.approx(1 / 12), 3),
        (3, 20): (pytest.approx(1 / 4), 1),
        (1, 10, 11): (pytest.approx(1 / 12), 2),
        (5, 12): (pytest.approx(1 / 12), 1),
    }


def _anew(given: int, said: int) -> tuple[Turn, Turn]:
    """The giver's view, written anew."""
    return _given(-1, given), _said(GIVER, 4, said)


def test_group_teaches_when_one_of_its_agents_can_learn():
    algorithm = _algorithm(zero_variance="replace")
    assert algorithm.trainable(_group(_game(1.0, 0.0), _game(1.0, 1.0))) == ""
    assert algorithm.trainable(_group(_game(1.0, 0.0), _game(1.0, 0.0))) == "all rewards equal"
    assert algorithm.trainable(_group(_game(None, None), _game(None, None))) == "no reward"
    assert algorithm.trainable(_group(_game(1.0, None), _game(None, 1.0))) == "one reward"


def test_equal_sums_of_unequal_rewards_are_not_flat():
    """A zero-sum game: the episode as a whole earned the same in both, its agents did not."""
    group = _group(_game(1.0, -1.0, reward=0.0), _game(-1.0, 1.0, reward=0.0))
    assert _algorithm(zero_variance="replace").trainable(group) == ""


def test_rewards_of_turns_are_compared_with_the_same_turn_of_the_same_agent():
    steps = (StepScore(1, 0, 2, 1.0), StepScore(3, 0, 1, 7.0), StepScore(5, 0, 1, 2.0))
    group = _group(_game(0.0, 0.0, step_scores=steps), _game(0.0, 0.0, step_scores=(StepScore(5, 0, 1, 0.0),)))
    got = _algorithm(Algo(advantage=GrpoAdvantage(scale_rewards="none"), credit="turn")).advantages([group.episodes])[0]
    # turn 1 and 3: no other episode scored there, so no baseline. Turn 5: 2 against 0.
    assert [list(a) for a in got] == [[0, 0, 0, 2], [0, 0, 0, -2]]


def test_agent_who_did_not_speak_has_no_part_in_the_baseline():
    silent = samples.episode(
        index=2,
        turns=(_given(-1, 1), _said(GIVER, 0, 10)),
        agent_rewards={GIVER: 2.0, GUESSER: 99.0},
    )
    group = _group(_game(1.0, 0.0), _game(3.0, 2.0), silent)
    got = _algorithm().advantages([group.episodes])[0]
    assert [list(a) for a in got] == [[-1, -1, -1, -1], [1, 1, 1, 1], [0]]


def test_one_agent_alone_is_the_episode_itself():
    episode = samples.episode(turns=[_given(-1, 1), _said("policy", 0, 5)], reward=1.0)
    assert agents.part(episode, "policy") is episode
    assert agents.only(episode, ("policy",)) is episode


def _gdpo(scores: list[list[float]], *, weights: list[float]):
    """The advantages of one group with this table of scores."""
    count = len(scores)
    step = StepRewards(
        rewards=[np.zeros(count)],
        lengths=[np.ones(count, np.int64)],
        tolerance=1e-6,
        scores=[np.array(scores)],
        weights=weights,
    )
    return gdpo(step)


def test_what_agents_earn_themselves_is_one_more_score_to_be_scaled():
    """With gdpo. The giver earned (1, 3) itself, the guesser nothing; a function of weight 2 said (5, 4) of the whole game."""
    first, second = _game(1.0, None, scores={"f": 5.0}, reward=10.0), _game(3.0, None, scores={"f": 4.0}, reward=8.0)
    algorithm = GroupedAlgorithm(
        RunConfig(algo=Algo(advantage=GdpoAdvantage()), reward=Reward(functions=("f",), weights=(2.0,)))
    )
    got = algorithm.advantages([(first, second)])[0]
    (giver,) = _gdpo([[5.0, 1.0], [4.0, 3.0]], weights=[2.0, 1.0])
    (guesser,) = _gdpo([[5.0], [4.0]], weights=[2.0])
    for episode, due in enumerate(got):
        assert list(due) == [giver[episode], giver[episode], guesser[episode], giver[episode]]
    assert giver[0] == pytest.approx(2**-0.5, rel=1e-3)
    assert algorithm.trainable(_group(first, second)) == ""


def test_silent_agent_has_no_score_either():
    silent = samples.episode(index=2, turns=[_given(-1, 1), _said(GIVER, 0, 10)], scores={"f": 9.0})
    games = (_game(1.0, 0.0, scores={"f": 1.0}), _game(1.0, 0.0, scores={"f": 2.0}))
    algorithm = GroupedAlgorithm(RunConfig(algo=Algo(advantage=GdpoAdvantage()), reward=Reward(functions=("f",))))
    with_it, without = (algorithm.advantages([group])[0] for group in ((*games, silent), games))
    assert [due[2] for due in with_it[:2]] == [due[2] for due in without]


def test_metrics_have_a_mean_per_agent_and_per_number_of_the_environment():
    first, second = (
        _game(1.0, 0.0, metrics={"env/turns": 3.0}),
        _game(2.0, None, metrics={"env/turns": 5.0, "env/won": 1.0}),
    )
    scored = ScoreStats()
    scored.add(_group(first, second))
    got = scored.metrics()
    assert (got["reward/agent/giver"], got["reward/agent/guesser"]) == (1.5, 0.0)
    assert (got["env/turns"], got["env/won"]) == (4.0, 0.5)
    assert "reward/mean" not in got


def test_evaluation_counts_episodes_in_which_only_agents_earned_something():
    got = eval_metrics([_group(_game(1.0, 0.0), _game(0.0, None)), _group(_game(0.5, 3.0), _game(None, None))])
    assert (got["eval/episodes"], got["eval/failed"]) == (3.0, 1.0)
    assert (got["eval/agent/giver"], got["eval/agent/guesser"]) == (0.5, 1.5)
    assert got["eval/tokens_mean"] == 4.0
    assert "eval/reward" not in got
