"""Rewards through the whole loop: real reward functions and the real algorithm between virtual engine and learner."""

from __future__ import annotations

import functools

import anyio
import msgspec
import numpy as np
import pytest

from corrente.algo.grouped import GroupedAlgorithm
from corrente.config import Filter, Limits, RunConfig
from corrente.controller.parts import Parts
from corrente.data.types import Batch, Group
from corrente.errors import FailureBudgetError, NothingToLearnError
from corrente.score.combined import CombinedScorer, ScorerTerms
from corrente.score.functions import FunctionsScorer, function_members
from corrente.sim.distributions import Fixed, Uniform
from corrente.sim.faults import Fault
from corrente.testing import Simulation, World, run_virtual, simulate
from corrente.testing.world import build, flow, play

PLAIN = World()


class Recorded(GroupedAlgorithm):
    """The real algorithm; keeps what it was given and what it made of it."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self.steps: list[tuple[tuple[Group, ...], Batch]] = []

    def batch(self, groups, **kwargs) -> Batch:
        batch = super().batch(groups, **kwargs)
        self.steps.append((tuple(groups), batch))
        return batch


async def direct(call):
    """Synchronous functions are called on the spot: there are no threads in virtual time."""
    return call()


def train(
    config: RunConfig, functions, *, world: World = PLAIN, deadline_s: float = 10.0, terms: ScorerTerms | None = None
):
    """``terms``: of each function; else they have ``deadline_s`` and are otherwise free."""

    algorithm = Recorded(config)

    def change(parts: Parts) -> Parts:
        scorer = FunctionsScorer(functions, deadline_s=deadline_s, offload=direct)
        if terms is not None:
            scorer = CombinedScorer([(source, terms) for source, _ in function_members(functions, offload=direct)])
        return msgspec.structs.replace(parts, scorer=scorer, algorithm=algorithm)

    return simulate(config, world, limit_s=100_000, change=change), algorithm


def alternating(completions, row, **_) -> list[float]:
    return [float(at % 2) for at in range(len(completions))]


def column(run: Simulation, name: str) -> list[float]:
    return [values[name] for _, values in run.sink.rows if name in values]


def test_none_is_left_out_of_a_functions_mean() -> None:
    def sometimes(completions) -> list[float | None]:
        return [None if at % 2 else 2.0 for at in range(len(completions))]

    run, algorithm = train(flow(steps=5, size=4), [alternating, sometimes])
    assert set(column(run, "reward/sometimes")) == {2.0}
    assert set(column(run, "reward/alternating")) == {0.5}
    assert set(column(run, "reward/mean")) == {1.5}
    rewards = {e.index: e.reward for groups, _ in algorithm.steps for g in groups for e in g.episodes}
    assert rewards == {0: 2.0, 1: 1.0, 2: 2.0, 3: 1.0}


def test_groups_without_any_reward_are_not_trained() -> None:
    def every_third(completions, row) -> list[float | None]:
        return [None if row[0] % 3 else float(at) for at in range(len(completions))]

    run, algorithm = train(flow(steps=5, size=3), [every_third])
    assert run.counts["filtered"] >= 10
    assert run.counts["trained"] == 10
    assert all(g.prompt.fields["row"] % 3 == 0 for groups, _ in algorithm.steps for g in groups)
    run, _ = train(flow(steps=5, filter=Filter(patience=3)), [lambda completions: [None] * len(completions)])
    assert isinstance(run.error, NothingToLearnError)
    assert "no reward" in str(run.error)


def test_episode_without_reward_is_neither_trained_nor_a_zero() -> None:
    def third_not_applicable(completions) -> list[float | None]:
        return [None if at == 2 else float(at) for at in range(len(completions))]

    run, algorithm = train(flow(steps=4, size=4), [third_not_applicable])
    assert run.error is None
    for groups, batch in algorithm.steps:
        assert batch.sequences == 4 * len(groups)
        assert len(batch.rows) == 3 * len(groups)
        for group in groups:
            advantages = [float(r.advantages[r.loss_mask][0]) for r in batch.rows if r.group == group.id]
            expected = np.array([0.0, 1.0, 3.0])
            expected = (expected - expected.mean()) / (expected.std(ddof=1) + 1e-4)
            assert advantages == pytest.approx(expected.tolist(), rel=1e-4)
            assert sum(advantages) == pytest.approx(0.0, abs=1e-5)


def test_filtered_groups_are_replaced_and_each_reason_is_counted() -> None:
    """Every third prompt is too hard, every third too easy; the steps are full of the rest."""

    def graded(completions, row) -> list[float]:
        hard, easy = row[0] % 3 == 0, row[0] % 3 == 1
        return [0.1 * at if hard else 1.0 + at if easy else float(at % 2) for at in range(len(completions))]

    config = msgspec.structs.replace(
        flow(steps=6, size=4, filter=Filter(pass_rate_min=0.25, pass_rate_max=0.75)),
        checkpoint=msgspec.structs.replace(flow().checkpoint, every=6),
    )
    run, algorithm = train(config, [graded])
    assert run.error is None
    assert run.counts["trained"] == 12
    assert {g.prompt.fields["row"] % 3 for groups, _ in algorithm.steps for g in groups} == {2}
    reasons = run.checkpoints.read()[0].ledger.reasons["filtered"]
    assert set(reasons) == {"pass rate below filter.pass_rate_min", "pass rate above filter.pass_rate_max"}
    assert min(reasons.values()) >= 10


def test_float_noise_earns_no_advantage() -> None:
    def noisy(completions) -> list[float]:
        return [0.5 + 1e-7 * at for at in range(len(completions))]

    run, _ = train(flow(steps=3, filter=Filter(patience=3)), [noisy])
    assert isinstance(run.error, NothingToLearnError)
    for kind in ("skip", "keep"):
        run, algorithm = train(flow(steps=3, size=4, filter=Filter(zero_variance=kind, patience=100)), [noisy])
        assert run.error is None
        largest = [abs(r.advantages).max() for _, batch in algorithm.steps for r in batch.rows]
        assert max(largest, default=0.0) == 0.0


def test_run_of_steps_without_gradient_ends_too() -> None:
    """``skip`` keeps flat groups in their step; a run that only skips is one that learns nothing."""
    run, _ = train(flow(steps=50, filter=Filter(zero_variance="skip", patience=4)), [lambda completions: 1.0])
    assert run.error is not None
    flat = [lambda completions: [1.0] * len(completions)]
    run, _ = train(flow(steps=50, filter=Filter(zero_variance="skip", patience=4)), flat)
    assert isinstance(run.error, NothingToLearnError)
    assert len(run.learner.steps) <= 5
    assert run.learner.state == 0


def test_lone_survivor_teaches_nothing() -> None:
    def only_first(completions) -> list[float]:
        return [1.0 if at == 0 else float("nan") for at in range(len(completions))]

    config = flow(steps=3, filter=Filter(patience=4), limits=Limits(failure_fraction=1.0))
    run, algorithm = train(config, [only_first], world=World(rows=6))
    assert isinstance(run.error, NothingToLearnError)
    assert "nothing of it was trained on (6 failed: only_first" in str(run.error)
    assert algorithm.steps == []


def fails_on_odd_rows(how: str):
    async def flaky(completions, row) -> list[float]:
        if row[0] % 2 == 0:
            return [float(at % 2) for at in range(len(completions))]
        if how == "raises":
            raise KeyError("answer")
        if how == "hangs":
            await anyio.sleep_forever()
        return [1.0] if how == "too few" else [float("inf")] * len(completions)

    return flaky


@pytest.mark.parametrize("how", ["raises", "hangs", "too few", "not finite"])
def test_reward_function_that_fails_costs_those_episodes_and_is_named(how: str) -> None:
    config = msgspec.structs.replace(
        flow(steps=6, limits=Limits(failure_fraction=0.9)),
        checkpoint=msgspec.structs.replace(flow().checkpoint, every=6),
    )
    run, algorithm = train(config, [fails_on_odd_rows(how)])
    assert run.counts["trained"] == 12
    assert run.counts["failed"] >= 8
    assert {g.prompt.fields["row"] % 2 for groups, _ in algorithm.steps for g in groups} == {0}
    reasons = run.checkpoints.read()[0].ledger.reasons["failed"]
    assert all(reason.startswith("flaky: ") for reason in reasons)


@pytest.mark.parametrize("how", ["raises", "hangs", "too few", "not finite"])
def test_reward_function_that_always_fails_ends_the_run(how: str) -> None:
    broken = fails_on_odd_rows(how)

    async def always(completions) -> list[float]:
        return await broken(completions, [1])

    run, _ = train(flow(steps=100), [always])
    assert isinstance(run.error, FailureBudgetError)
    assert "always: " in str(run.error)


def test_slow_rewards_run_beside_everything_else() -> None:
    """Scoring takes five times as long as a step, and with enough groups in flight costs the learner nothing."""

    async def slow(completions) -> list[float]:
        await anyio.sleep(5.0)
        return [float(at % 2) for at in range(len(completions))]

    async def slower(completions) -> list[float]:
        await anyio.sleep(6.0)
        return [0.0] * len(completions)

    world = World(lengths=Fixed(5), step_s=Fixed(1.0), stage_s=Fixed(0.0))
    run, _ = train(flow(steps=40, ahead=8), [slow, slower], world=world)
    first_s = 0.5 + 6.0
    assert run.elapsed_s == pytest.approx(first_s + 40 * 1.0, abs=1.0)


def test_scoring_of_one_group_does_not_wait_for_another() -> None:
    async def depends(completions, row) -> list[float]:
        await anyio.sleep(30.0 if row[0] == 0 else 0.1)
        return [float(at % 2) for at in range(len(completions))]

    run, _ = train(
        flow(steps=8, ahead=3, window=6), [depends], world=World(lengths=Uniform(low=1, high=9)), deadline_s=60
    )
    assert run.error is None
    ends = {name: stop for track, name, _, stop in run.sink.spans if track == "score"}
    assert ends["group 0"] > 30.0
    assert sum(stop < 10.0 for stop in ends.values()) >= 7


def test_scorer_with_a_limit_throttles_admission_and_drops_nothing() -> None:
    """Scoring is the bottleneck: one group every two seconds. Groups wait for it in their slots, so generation is admitted at its
    pace; none is dropped and none waits without bound."""

    async def slow(completions) -> list[float]:
        await anyio.sleep(2.0)
        return [float(at % 2) for at in range(len(completions))]

    config = flow(steps=20, prompts=2, ahead=2, window=3)
    world = World(lengths=Fixed(5), step_s=Fixed(0.5), stage_s=Fixed(0.0))
    run, _ = train(config, [slow], world=world, terms=ScorerTerms(at_once=1, deadline_s=3.0))
    slots = 3 * 2
    assert run.error is None
    assert {k: n for k, n in run.counts.items() if k not in ("trained", "cancelled")} == dict.fromkeys(
        ("filtered", "failed", "stale"), 0
    )
    assert run.counts["trained"] == 40
    assert run.elapsed_s == pytest.approx(40 * 2.0, rel=0.05)
    assert max(column(run, "score/slow_queue")) <= slots
    assert max(column(run, "score/slow_queue_max")) <= slots
    assert column(run, "score/slow_latency_p95_s")[-1] == pytest.approx(2.0)
    assert column(run, "score/slow_wait_p95_s")[-1] <= slots * 2.0
    assert column(run, "score/slow_failed")[-1] == 0.0
    assert len(run.prompts.given) <= 40 + slots


@pytest.mark.parametrize(("failure", "reward"), [("none", None), ("default", 0.25)])
def test_scorer_that_fails_sometimes_costs_what_its_policy_says(failure, reward) -> None:
    run, algorithm = train(
        flow(steps=5, filter=Filter(zero_variance="skip", patience=100)),
        [alternating, fails_on_odd_rows("raises")],
        terms=ScorerTerms(failure=failure, default=0.25),
    )
    assert run.error is None
    assert run.counts["failed"] == 0
    odd = [e for groups, _ in algorithm.steps for g in groups if g.prompt.fields["row"] % 2 for e in g.episodes]
    assert odd
    assert {e.scores["flaky"] for e in odd} == {reward}
    assert column(run, "score/flaky_failed")[-1] >= 2


@pytest.mark.parametrize("how", ["raises", "hangs", "too few", "not finite"])
def test_policy_does_not_hide_a_scorer_that_always_fails(how: str) -> None:
    broken = fails_on_odd_rows(how)

    async def always(completions) -> list[float]:
        return await broken(completions, [1])

    run, _ = train(flow(steps=1000), [alternating, always], terms=ScorerTerms(failure="none", deadline_s=10.0))
    assert isinstance(run.error, FailureBudgetError)
    assert "always: " in str(run.error)


class Judge:
    def __call__(self, completions) -> list[float]:
        return [float(at % 2) for at in range(len(completions))]


class AsyncJudge:
    async def __call__(self, completions) -> list[float]:
        await anyio.lowlevel.checkpoint()
        return [float(at % 2) for at in range(len(completions))]


def scaled(completions, factor: float) -> list[float]:
    return [factor * (at % 2) for at in range(len(completions))]


@pytest.mark.parametrize(
    "function",
    [
        lambda completions: [float(at % 2) for at in range(len(completions))],
        functools.partial(scaled, factor=3.0),
        Judge(),
        AsyncJudge(),
        alternating,
    ],
    ids=["lambda", "partial", "object", "async object", "function"],
)
def test_any_callable_is_a_reward_function(function) -> None:
    run, _ = train(flow(steps=3), [function])
    assert run.counts["trained"] == 6
    assert run.counts["failed"] == 0


def test_lone_survivor_is_trained_on_where_the_algorithm_can_learn_from_it() -> None:
    async def main() -> Simulation:
        simulation = build(flow(steps=4), World(faults=(Fault(stage="generate", key="*/0/0"),)))
        simulation.algorithm.trainable = lambda group: "" if group.episodes else "no survivor"  # type: ignore[method-assign]
        return await play(simulation)

    run = run_virtual(main, limit_s=1000)
    assert run.counts["failed"] == 0
    assert run.counts["trained"] == 8
