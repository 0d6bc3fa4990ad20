"""Evaluation beside training, in virtual time: its share of the engine, its labels, stops and resumes."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from corrente.config import Checkpoint, Eval
from corrente.sim.distributions import Fixed
from corrente.sim.speed import Speed
from corrente.testing import Simulation, World, simulate
from corrente.testing.world import LANDINGS, flow


def evaluations(run: Simulation) -> list[tuple[int, dict[str, float]]]:
    return [(step, dict(values)) for step, values in run.sink.rows if "eval/episodes" in values]


def test_evaluation_keeps_to_its_share_of_the_engine_so_that_the_learner_does_not_wait() -> None:
    """A hundred held-out prompts on an engine of eight places: all at once they stand before every training request."""
    world = World(lengths=Fixed(10), eval_rows=100, max_sequences=8, speed=Speed(step_s=0.1, per_sequence_s=0.0))
    steps_s = {}
    for at_once in (2, 100):
        config = flow(steps=30, ahead=1, eval=Eval(every=5, at_once=at_once))
        run = simulate(config, world)
        ends = [v["time/elapsed_s"] for _, v in run.sink.rows if "time/elapsed_s" in v]
        steps_s[at_once] = max(b - a for a, b in itertools.pairwise(ends))
        assert evaluations(run)
    quiet = simulate(flow(steps=30, ahead=1, eval=Eval(every=0)), world)
    ends = [v["time/elapsed_s"] for _, v in quiet.sink.rows if "time/elapsed_s" in v]
    slowest_s = max(b - a for a, b in itertools.pairwise(ends))
    assert steps_s[2] < 2 * slowest_s
    assert steps_s[100] > 5 * slowest_s


def test_evaluation_is_labelled_with_the_step_whose_weights_it_played() -> None:
    run = simulate(flow(steps=12, every=3, eval=Eval(every=2)), World(lengths=Fixed(3), eval_rows=2))
    assert [(step, values["eval/version"]) for step, values in evaluations(run)] == [(0, 0), (6, 2), (12, 4)]


def test_evaluation_before_the_first_step_can_be_left_out() -> None:
    run = simulate(flow(steps=6, eval=Eval(every=2, at_start=False, at_once=4)), World(lengths=Fixed(1), eval_rows=2))
    assert [step for step, _ in evaluations(run)] == [2, 4, 6]


def test_evaluation_that_runs_is_cut_off_by_a_stop_and_said_so() -> None:
    world = World(lengths=lambda request: 2 if request.group.isdigit() else 10_000, eval_rows=2)
    run = simulate(flow(steps=1000, eval=Eval(every=1000)), world, stop_at_s=5.0)
    assert run.outcome is not None
    assert (run.outcome.ended, evaluations(run)) == ("stopped", [])
    assert run.elapsed_s < 30
    assert any("evaluation of version 0 was cut off" in message for _, message in run.sink.events)


@pytest.mark.parametrize("kill_s", [4.0, 9.5, 14.0])
def test_resumed_run_repeats_no_evaluation_that_its_checkpoint_knows_of(kill_s: float) -> None:
    config = flow(steps=12, eval=Eval(every=4, at_once=8), checkpoint=Checkpoint(every=2))
    world = World(lengths=Fixed(3), eval_rows=3)
    first = simulate(config, world, kill_at_s=kill_s)
    snapshot, _ = first.checkpoints.read()
    before = [step for step, _ in evaluations(first) if step <= snapshot.step and step <= snapshot.evaluated]
    second = simulate(config, world, resume=first.checkpoints.read())
    assert before + [step for step, _ in evaluations(second)] == [0, 4, 8, 12]
    again = simulate(config, world, resume=second.checkpoints.read())
    assert again.consumed == []
    assert [step for step, _ in evaluations(again)] in ([], [12])  # [12]: the last checkpoint was written before it


def test_samples_of_a_prompt_are_scored_together_and_told_apart() -> None:
    rewards = World(eval_rows=3, lengths=Fixed(2), reward=lambda episode, prompt: float(episode.index == 1))
    run = simulate(flow(steps=2, eval=Eval(every=2, samples=4, pass_at=(1, 4))), rewards)
    _, last = evaluations(run)[-1]
    assert (last["eval/episodes"], last["eval/reward"]) == (12, 0.25)
    assert (last["eval/pass@1"], last["eval/pass@4"]) == (0.25, 1.0)


@pytest.mark.parametrize("landing", LANDINGS, ids=lambda landing: type(landing).__name__)
def test_no_flip_waits_for_held_out_completions(landing: Any) -> None:
    """They are ten times as long as those of training, and one evaluation follows another."""
    world = World(
        lengths=lambda request: 10 if request.group.isdigit() else 100,
        eval_rows=4,
        speed=Speed(step_s=0.1, per_sequence_s=0.0),
    )
    took_s: dict[int, float] = {}
    for every in (0, 1):
        config = flow(steps=60, ahead=1, inflight=landing, eval=Eval(every=every, at_once=2))
        run = simulate(config, world, limit_s=10_000)
        assert run.error is None
        ends = [v["time/elapsed_s"] for _, v in run.sink.rows if "learner/idle_fraction" in v]
        took_s[every] = ends[-1]
        assert all(values["eval/lost"] == 0 for _, values in evaluations(run))
    assert len(evaluations(run)) > 2
    assert took_s[1] < 1.3 * took_s[0]
