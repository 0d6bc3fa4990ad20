"""What leaves its band is told once, with value, band and likely causes; what hovers at the edge is not told again."""

from __future__ import annotations

import math

import pytest

from corrente.config import Alarm
from corrente.controller.alarms import Alarms, bands
from corrente.errors import AlarmError
from corrente.sim.parts import RecordingSink


def told(alarm: Alarm, name: str, values: list[float | None]) -> list[str]:
    """Per step what was said, "" for nothing."""
    sink, said = RecordingSink(), []
    alarms = Alarms(alarm, sink)
    for step, value in enumerate(values):
        before = len(sink.events)
        alarms.check_step(step, {} if value is None else {name: value}, may_stop=True)
        said.append(" ".join(level for level, _ in sink.events[before:]))
    return said


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("ratio/ess", [0.9, 0.4, 0.3, 0.52, 0.45, 0.56, 0.49]),
        ("mismatch_clean/logprob_gap_mean", [0.01, 0.2, 0.3, 0.095, 0.11, 0.08, 0.12]),
        ("mismatch_mixed/logprob_gap_mean", [0.01, 0.2, 0.3, 0.095, 0.11, 0.08, 0.12]),
    ],
)
def test_alarm_is_told_once_until_the_value_is_well_inside(name: str, values: list[float]):
    assert told(Alarm(), name, [*values]) == ["", "warning", "", "", "", "info", "warning"]


def test_alarm_names_value_band_and_likely_causes():
    sink = RecordingSink()
    Alarms(Alarm(), sink).check_step(7, {"ratio/ess": 0.25, "mismatch_clean/logprob_gap_mean": 0.5}, may_stop=True)
    (_, ess), (_, gap) = sink.events
    assert "step 7: ratio/ess = 0.25 is below alarm.ess_min = 0.5" in ess
    assert "learner.lr" in ess
    assert "step 7: mismatch_clean/logprob_gap_mean = 0.5 is above alarm.mismatch_max = 0.1" in gap
    assert "weights" in gap
    assert "model.dtype" in gap


def test_step_that_says_nothing_changes_nothing():
    assert told(Alarm(), "ratio/ess", [0.4, None, 0.3, None, 0.9]) == ["warning", "", "", "", "info"]


def test_no_number_is_outside_every_band():
    assert told(Alarm(), "ratio/ess", [math.nan]) == ["warning"]


def test_stale_keys_are_not_blamed_where_the_weights_are_wrong():
    sink = RecordingSink()
    alarms, gap = Alarms(Alarm(), sink), "logprob_gap_mean"
    alarms.check_step(1, {f"mismatch_clean/{gap}": 0.4, f"mismatch_mixed/{gap}": 0.5}, may_stop=True)
    assert len(sink.events) == 1
    alarms.check_step(2, {f"mismatch_clean/{gap}": 0.01, f"mismatch_mixed/{gap}": 0.5}, may_stop=True)
    assert [level for level, _ in sink.events] == ["warning", "info", "warning"]
    assert "recompute" in sink.events[-1][1]


def test_zero_switches_a_band_off():
    assert [band.metric for band in bands(Alarm(mismatch_max=0.0))] == ["ratio/ess"]
    assert not bands(Alarm(ess_min=0.0, mismatch_max=0.0))


def test_alarm_that_stops_waits_until_it_may():
    alarms = Alarms(Alarm(action="stop"), RecordingSink())
    alarms.check_step(1, {"ratio/ess": 0.1}, may_stop=False)
    with pytest.raises(AlarmError, match=r"step 1: ratio/ess = 0\.1"):
        alarms.check_step(2, {"ratio/ess": 0.9}, may_stop=True)
