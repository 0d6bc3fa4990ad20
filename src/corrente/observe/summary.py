"""Summarise a run: a sink that reduces some metrics over the run and renders a few lines at the end. It prints nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from corrente.data.reductions import Accumulator, Reduction

REDUCTIONS: dict[str, tuple[Reduction, ...]] = {
    "reward/mean": ("first", "last"),
    "eval/reward": ("first", "last", "max"),
    "eval/version": ("last",),
    "samples/trained": ("sum",),
    "samples/tokens": ("sum",),
    "lag/mean": ("mean",),
    "lag/max": ("max",),
    "lag/bound": ("last",),
    "time/elapsed_s": ("last",),
    "engine/idle_fraction": ("mean",),
    "learner/idle_fraction": ("mean",),
    "wait/learner_groups_fraction": ("mean",),
    "wait/feed_slot_fraction": ("mean",),
    "mismatch/logprob_gap_mean": ("first",),
}
"""The reductions of each metric over the steps of the run."""

NOTABLE_WAIT = 0.1
"""The summary mentions a wait that took at least this fraction of the time."""
STEPS_TO_JUDGE = 5
"""The summary judges waits from this many steps on: in the first step the learner always waits."""
OUTCOMES = ("trained", "filtered", "failed", "stale", "cancelled")


class SummarySink:
    """Implements Sink. ``add_records`` adds the records of the part of the run before a resume."""

    def __init__(self, *, may_run_ahead: bool = True) -> None:
        """``may_run_ahead``: a larger staleness.max would let generation run further ahead."""
        self._reduced = Accumulator()
        self._may_run_ahead = may_run_ahead
        self.step = 0
        self.warnings = 0
        self.latest: dict[str, float] = {}
        """The newest value of each metric of a step; a step does not report those it has no numbers for."""
        self.first_evaluation: dict[str, float] = {}
        self.last_evaluation: dict[str, float] = {}

    def add_records(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Add records that were read from metrics.jsonl."""
        for record in records:
            numbers = {k: v for k, v in record.items() if isinstance(v, int | float)}
            self.log_metrics(int(numbers.pop("step")), numbers)

    def log_metrics(self, step: int, values: Mapping[str, float]) -> None:
        self.step = max(self.step, step)
        evaluation = {name: value for name, value in values.items() if name.startswith("eval/")}
        if evaluation:
            self.first_evaluation, self.last_evaluation = self.first_evaluation or evaluation, evaluation
        self.latest |= {name: value for name, value in values.items() if name not in evaluation}
        for name, reductions in REDUCTIONS.items():
            if name in values:
                for how in reductions:
                    self._reduced.record(f"{name} {how}", values[name], reduction=how)

    def log_span(self, track: str, name: str, start_s: float, stop_s: float, attrs: Mapping[str, Any]) -> None:
        pass

    def log_sample(self, step: int, sample: Mapping[str, Any]) -> None:
        pass

    def log_event(self, level: str, message: str) -> None:
        self.warnings += level == "warning"

    def close(self) -> None:
        pass

    @property
    def samples(self) -> int:
        """Episodes that were trained on."""
        return int(self._reduced.value("samples/trained sum") or 0)

    def summary_lines(self, *, ended: str, counts: Mapping[str, int]) -> list[tuple[str, str]]:
        """The summary as (label, text) lines; metrics that were never measured are left out.

        ``ended``: how the run ended, for the first line; ``counts``: admitted prompts by outcome.
        """
        get = self._reduced.value
        out = [("steps", f"{self.step} ({ended})")]
        out += _change_line("reward", get("reward/mean first"), get("reward/mean last"))
        held_out = _change_line("held-out", get("eval/reward first"), get("eval/reward last"))
        if held_out:
            best = f"   (best {get('eval/reward max'):.3f}; last at version {get('eval/version last') or 0:.0f})"
            out.append(("held-out", held_out[0][1] + best))
        samples, elapsed_s = get("samples/trained sum"), get("time/elapsed_s last")
        if samples and elapsed_s:
            tokens = get("samples/tokens sum")
            rate = f", {tokens / elapsed_s:.0f} tokens/s" if tokens else ""
            out.append(("throughput", f"{samples / elapsed_s:.2f} samples/s{rate} over {format_duration(elapsed_s)}"))
        out += self._lag_lines() + self._idle_lines()
        gap = get("mismatch/logprob_gap_mean first")
        if gap is not None:
            out.append(("log-prob gap", f"{gap:.1e} mean between engine and learner at equal weights"))
        if counts:
            known = [f"{counts.get(name, 0)} {name}" for name in OUTCOMES]
            out.append(("prompts", ", ".join(known)))
        if self.warnings:
            out.append(("warnings", f"{self.warnings}, in events.jsonl"))
        return out

    def _lag_lines(self) -> list[tuple[str, str]]:
        mean, most, bound = (self._reduced.value(f"lag/{name}") for name in ("mean mean", "max max", "bound last"))
        if mean is None or most is None:
            return []
        limit = "no bound" if bound is None else f"bound {bound:.0f}"
        return [("lag", f"{mean:.2f} mean, {most:.0f} max ({limit}), in versions")]

    def _idle_lines(self) -> list[tuple[str, str]]:
        engine, learner = (self._reduced.value(f"{side}/idle_fraction mean") for side in ("engine", "learner"))
        if engine is None or learner is None:
            return []
        return [("idle", f"engine {engine:.0%}, learner {learner:.0%}"), *self._advice_lines(engine, learner)]

    def _advice_lines(self, engine: float, learner: float) -> list[tuple[str, str]]:
        """Advise a larger ``staleness.max`` where engine and learner both idled.

        Then everything that may be generated was already in progress and the run waited for latency, which more generation ahead
        hides. When one side idles alone, the other is slower, and running ahead does not help.
        """
        groups, slots = (self._reduced.value(f"wait/{name}_fraction mean") for name in ("learner_groups", "feed_slot"))
        waited = min(engine, learner, groups or 0.0, slots or 0.0)
        if waited < NOTABLE_WAIT or self.step < STEPS_TO_JUDGE or not self._may_run_ahead:
            return []
        return [("", "they waited for one another: a larger staleness.max lets generation run further ahead")]


def format_duration(seconds: float) -> str:
    """Format a duration as "42 s", "3 min 07 s" or "2 h 05 min"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def _change_line(label: str, first: float | None, last: float | None) -> list[tuple[str, str]]:
    return [] if first is None or last is None else [(label, f"{first:.3f} -> {last:.3f}")]
