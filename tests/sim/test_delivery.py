"""Publishing beside the learner: what it waits for, what it does not, and what becomes of a delivery that goes wrong."""

from __future__ import annotations

import itertools

import pytest

from corrente.config import Checkpoint
from corrente.errors import SyncError
from corrente.sim.distributions import Fixed
from corrente.sim.faults import Fault
from corrente.testing import Simulation, World, simulate
from corrente.testing.world import LANDINGS, flow

STEP_S, EXPORT_S = 10.0, 1.0


def world(*, deliver_s: float, **more: object) -> World:
    """Generation is quick, so that the learner is what a run waits for."""
    return World(
        lengths=Fixed(5),
        step_s=Fixed(STEP_S),
        export_s=Fixed(EXPORT_S),
        deliver_s=Fixed(deliver_s),
        **more,  # pyright: ignore[reportArgumentType]
    )


def periods_s(run: Simulation) -> list[float]:
    """Seconds from the beginning of a step to that of the next, once the pipeline is full."""
    starts = [step.start_s for step in run.learner.steps]
    return [after - before for before, after in itertools.pairwise(starts)][2:]


def spans(run: Simulation, name: str) -> list[tuple[float, float]]:
    return [(start, stop) for _, of, start, stop in run.sink.spans if of.startswith(name)]


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("landing", LANDINGS, ids=lambda landing: type(landing).__name__)
def test_learner_takes_its_next_step_while_a_version_is_delivered(landing, shared: bool) -> None:
    run = simulate(flow(steps=10, ahead=2, inflight=landing), world(deliver_s=9.0, shared=shared))
    assert run.error is None
    assert periods_s(run) == pytest.approx([STEP_S + EXPORT_S] * 7)
    steps = spans(run, "step ")
    for start, stop in spans(run, "deliver ")[1:-1]:  # the first version has no step beside it, nor has the last
        assert any(began <= start and stop <= ended for began, ended in steps)
    waited = [values["wait/learner_publish_fraction"] for _, values in run.sink.rows]
    assert max(waited) == pytest.approx(0.0, abs=1e-6)


def test_step_without_a_delivery_beside_it_would_take_as_long_as_both() -> None:
    """The same work in an export, which the learner does wait for: what a publish cost before it was split."""
    run = simulate(flow(steps=10, ahead=2), World(lengths=Fixed(5), step_s=Fixed(STEP_S), export_s=Fixed(10.0)))
    assert periods_s(run) == pytest.approx([STEP_S + 10.0] * 7)


def test_learner_is_at_most_one_version_ahead_of_a_slow_delivery() -> None:
    """A delivery that takes longer than a step sets the pace, and the learner waits for its flip before it exports again."""
    run = simulate(flow(steps=8, ahead=4), world(deliver_s=35.0))
    assert run.error is None
    live_s = dict(run.sync.published)
    for (start_s, _), version in zip(spans(run, "export "), range(9), strict=True):
        assert version == 0 or live_s[version - 1] <= start_s
    assert periods_s(run)[1:] == pytest.approx([35.0 + EXPORT_S] * 4, abs=0.2)


@pytest.mark.parametrize("ahead", [0, 1, 3])
@pytest.mark.parametrize("every", [1, 2])
def test_age_stays_within_the_bound_however_slow_delivery_is(ahead: int, every: int) -> None:
    run = simulate(flow(steps=12, ahead=ahead, window=1, every=every), world(deliver_s=300.0))
    assert run.error is None
    assert run.max_age <= ahead
    live_s = [at for _, at in run.sync.published]
    if ahead == 0:  # nothing is generated under a version that the learner has left
        assert all(entry.version == entry.admitted_version for entry in run.consumed)
        last_of_version = run.learner.steps[every - 1 :: every]
        assert all(step.start_s + STEP_S <= live for step, live in zip(last_of_version, live_s[1:], strict=True))


def test_delivery_that_fails_is_tried_again_beside_the_learner_and_exported_once() -> None:
    faults = (Fault(stage="deliver", calls=(3, 4)), Fault(stage="receive", calls=(6,)))
    run = simulate(flow(steps=8, ahead=2), world(deliver_s=1.0, faults=faults))
    assert run.error is None
    assert [version for version, _ in run.sync.published] == list(range(9))
    assert len(spans(run, "export ")) == len(spans(run, "deliver ")) == 9
    warnings = [text for _, text in run.sink.events if "trying again" in text]
    assert len(warnings) == 3
    assert all(text.startswith("delivering version ") for text in warnings)
    assert periods_s(run) == pytest.approx([STEP_S + EXPORT_S] * 5)


@pytest.mark.parametrize("stage", ["export", "deliver"])
def test_version_that_cannot_be_brought_ends_the_run_and_says_how_often_it_was_tried(stage) -> None:
    run = simulate(flow(steps=8, ahead=2), world(deliver_s=1.0, faults=(Fault(stage=stage, key="3"),)))
    assert isinstance(run.error, SyncError)
    assert f"{stage}ing version 3 failed 4 times; the last: injected fault" in str(run.error)
    assert [version for version, _ in run.sync.published] == [0, 1, 2]


@pytest.mark.parametrize("at_s", [25.0, 30.0, 40.0])
def test_stop_during_a_delivery_that_hangs_is_bounded_by_its_deadline(at_s: float) -> None:
    hangs = Fault(stage="deliver", kind="hang", calls=(2,))
    run = simulate(
        flow(steps=1000, ahead=2), world(deliver_s=1.0, faults=(hangs,), sync_deadline_s=30.0), stop_at_s=at_s
    )
    assert run.outcome is not None
    assert run.outcome.ended == "stopped"
    assert run.elapsed_s <= at_s + 30.0 + 2 * (STEP_S + EXPORT_S)
    assert len(run.checkpoints.written) == 1


@pytest.mark.parametrize("at_s", [24.5, 26.0, 31.0, 36.0])
def test_run_killed_during_a_delivery_goes_on_from_its_checkpoint(at_s: float) -> None:
    """The checkpoint is of the learner's version, live or not: resumed, it is published first."""
    config = flow(steps=9, ahead=2, checkpoint=Checkpoint(every=1))
    slow = world(deliver_s=9.0)
    killed = simulate(config, slow, kill_at_s=at_s)
    snapshot, state = killed.checkpoints.read()
    assert snapshot.version == snapshot.step == state
    assert killed.sync.published[-1][0] <= snapshot.version
    run = simulate(config, slow, resume=(snapshot, state))
    assert run.error is None
    assert run.sync.published[0][0] == snapshot.version
    assert run.outcome is not None
    assert (run.outcome.steps, run.learner.state) == (9, 9)
    assert run.max_age <= 2
