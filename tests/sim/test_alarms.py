"""An alarm in a whole run: it warns once and the run goes on, or the run ends at a version, with a checkpoint and an error."""

from __future__ import annotations

import msgspec
import pytest

from corrente.config import Alarm, RunConfig
from corrente.controller.snapshot import Snapshot
from corrente.data.types import Batch, Metrics
from corrente.errors import AlarmError
from corrente.sim.parts import VirtualLearner
from corrente.testing import Simulation, simulate
from corrente.testing.world import flow

STOP = Alarm(action="stop")


class Drifting(VirtualLearner):
    """Its samples are worth little from step ``since`` until step ``until``."""

    def __init__(self, since: int, until: int) -> None:
        super().__init__()
        self._bad = range(since, until)

    async def step(self, batch: Batch) -> Metrics:
        return {**await super().step(batch), "ratio/ess": 0.2 if batch.step + 1 in self._bad else 0.95}


def run(config: RunConfig, learner: Drifting) -> Simulation:
    return simulate(config, change=lambda parts: msgspec.structs.replace(parts, learner=learner))


def rang(done: Simulation) -> list[str]:
    return [text for _, text in done.sink.events if "ratio/ess" in text]


def test_alarm_warns_once_and_the_run_goes_on():
    done = run(flow(steps=12), Drifting(5, 9))
    assert done.counts["trained"] == 24
    warned, back = rang(done)
    assert warned.startswith("step 5: ratio/ess = 0.2 is below alarm.ess_min = 0.5")
    assert back == "step 9: ratio/ess = 0.95 is back in its band"


@pytest.mark.parametrize(("every", "stops_at"), [(1, 5), (3, 6)])
def test_alarm_that_stops_leaves_a_checkpoint_from_which_the_run_goes_on(every: int, stops_at: int):
    config = flow(steps=12, every=every, alarm=STOP)
    stopped = run(config, Drifting(5, 6))
    assert isinstance(stopped.error, AlarmError)
    assert rang(stopped)[0].startswith("step 5: ")
    assert len(stopped.learner.steps) == stops_at
    snapshot, state = stopped.checkpoints.read()
    assert isinstance(snapshot, Snapshot)
    assert (snapshot.step, snapshot.version) == (stops_at, stops_at // every)
    rest = simulate(config, resume=(snapshot, state))
    assert rest.counts["trained"] == 24
    trained = [entry.prompt_id for entry in stopped.consumed + rest.consumed]
    assert len(trained) == len(set(trained)) == 24


def test_alarm_at_the_last_step_is_an_error_too():
    done = run(flow(steps=6, alarm=STOP), Drifting(6, 7))
    assert isinstance(done.error, AlarmError)
    assert done.checkpoints.read()[0].step == 6
