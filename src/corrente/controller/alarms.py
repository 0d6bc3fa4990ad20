"""Alarms: a warning, or the end of the run, when a number that a step reports leaves its band.

Three bands, of three different faults (``alarm`` in the config, and docs/explanation/staleness.md):

    ratio/ess                          at least ess_min        the policy has moved away from its samples
    mismatch_clean/logprob_gap_mean    at most mismatch_max    engine and learner disagree about the same weights
    mismatch_mixed/logprob_gap_mean    at most mismatch_max    the same, where older weights sampled what stands before

The last says nothing new while the one before it is out of its band, and is not judged then. There is one event when a number
leaves its band, and one when it is back inside by a tenth, so that a number at the edge does not warn at every step. A number
that is missing, because the step has no such token, changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from corrente.config import Alarm
from corrente.errors import AlarmError
from corrente.observe.base import Sink

MARGIN = 0.1
"""A number counts as back when it is inside its band by this part of the way from the edge to the ideal."""


CLEAN, MIXED = "mismatch_clean/logprob_gap_mean", "mismatch_mixed/logprob_gap_mean"


class Band(msgspec.Struct, frozen=True, kw_only=True):
    """``metric`` should be ``ideal`` and may go as far as ``edge``, the value of ``key``. It is not judged while the metric
    ``behind`` is outside its own band."""

    metric: str
    key: str
    edge: float
    ideal: float
    causes: str
    behind: str = ""

    def outside(self, value: float) -> bool:
        """True when the value is past the edge, or not a number."""
        return not abs(value - self.ideal) <= abs(self.edge - self.ideal)

    def back(self, value: float) -> bool:
        """True when the value is inside by the margin."""
        return abs(value - self.ideal) <= (1 - MARGIN) * abs(self.edge - self.ideal)


def bands(alarm: Alarm) -> list[Band]:
    """The bands that are not switched off."""
    out: list[Band] = []
    if alarm.ess_min > 0:
        causes = (
            "the policy has moved far from its samples; lower learner.lr or staleness.max, or, where "
            "mismatch/logprob_gap_mean is high as well, look there first"
        )
        out.append(Band(metric="ratio/ess", key="alarm.ess_min", edge=alarm.ess_min, ideal=1.0, causes=causes))
    if alarm.mismatch_max > 0:
        of = {"key": "alarm.mismatch_max", "edge": alarm.mismatch_max, "ideal": 0.0}
        wrong = (
            "the engine does not hold the learner's weights (another model, a publish that lost something), or computes "
            "in coarser numbers (model.dtype, quantisation)"
        )
        stale = "keys and values of older weights; inflight.kind = recompute or resume rebuilds them"
        out.append(Band(metric=CLEAN, causes=wrong, **of))
        out.append(Band(metric=MIXED, causes=stale, behind=CLEAN, **of))
    return out


class Alarms:
    """The bands of a run, and the metrics that are outside theirs."""

    def __init__(self, alarm: Alarm, sink: Sink) -> None:
        self._bands = bands(alarm)
        self._stops = alarm.action == "stop"
        self._sink = sink
        self._outside: set[str] = set()
        self._failure: AlarmError | None = None

    def check_step(self, step: int, values: Mapping[str, float], *, may_stop: bool) -> None:
        """Judge the metrics of ``step``. With ``alarm.action`` stop, raises AlarmError for this step or an earlier one once
        ``may_stop``."""
        for band in self._bands:
            value = values.get(band.metric)
            if value is None or band.behind in self._outside:
                continue
            if band.metric not in self._outside and band.outside(value):
                self._outside.add(band.metric)
                self._warn(step, value, band)
            elif band.metric in self._outside and band.back(value):
                self._outside.discard(band.metric)
                self._sink.log_event("info", f"step {step}: {band.metric} = {value:.3g} is back in its band")
        if self._failure is not None and may_stop:
            raise self._failure

    def _warn(self, step: int, value: float, band: Band) -> None:
        side = "below" if band.edge < band.ideal else "above"
        text = f"step {step}: {band.metric} = {value:.3g} is {side} {band.key} = {band.edge:g}. Likely causes: {band.causes}"
        self._sink.log_event("warning", text)
        if self._stops and self._failure is None:
            self._failure = AlarmError(text)
