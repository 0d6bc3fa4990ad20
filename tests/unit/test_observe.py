"""Reductions, files and what is shown: computed by hand, and read back as a person or a viewer would."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from corrente.data.reductions import Accumulator
from corrente.observe.console import ConsoleSink, RunView, sparkline
from corrente.observe.jsonl import JsonlSink, TimelineLanes, read_lines, read_metrics, read_timeline, rewind_records
from corrente.observe.summary import SummarySink, format_duration
from corrente.testing.stages import check_sink

STEP = {
    "version/learner": 1.0,
    "time/elapsed_s": 5.0,
    "reward/mean": 0.25,
    "samples/trained": 64.0,
    "samples/tokens": 320.0,
    "lag/mean": 0.5,
    "lag/max": 1.0,
    "lag/bound": 2.0,
    "engine/tokens_per_s": 200.0,
    "engine/idle_fraction": 0.1,
    "learner/tokens_per_s": 500.0,
    "learner/idle_fraction": 0.4,
    "wait/learner_groups_fraction": 0.3,
    "groups/trained": 8.0,
    "buffer/ready": 2.0,
}


def _step(step: int, **changes: float) -> dict[str, float]:
    named = {name.replace("__", "/"): value for name, value in changes.items()}
    return {**STEP, "version/learner": float(step), "time/elapsed_s": 5.0 * step, **named}


# ---- reductions --------------------------------------------------------------------------------------------------------------


def test_accumulator_reduces_as_declared():
    kept = Accumulator()
    for value, weight in ((2.0, 100.0), (0.5, 900.0)):
        kept.record("loss", value, reduction="mean", weight=weight)
    for value in (3.0, 1.0, 2.0):
        for how in ("sum", "min", "max", "first", "last"):
            kept.record(how, value, reduction=how)
    assert kept.value("loss") == pytest.approx(0.65)
    assert {k: v for k, v in kept.reduced_values().items() if k != "loss"} == {
        "sum": 6.0,
        "min": 1.0,
        "max": 3.0,
        "first": 3.0,
        "last": 2.0,
    }
    assert kept.value("never") is None


def test_accumulator_refuses_a_name_used_in_two_ways():
    kept = Accumulator()
    kept.record("lag", 1.0, reduction="max")
    with pytest.raises(ValueError, match="lag is a max"):
        kept.record("lag", 1.0, reduction="mean")
    with pytest.raises(ValueError, match="weight of -1"):
        kept.record("x", 1.0, reduction="mean", weight=-1)


@given(st.lists(st.tuples(st.floats(-1e3, 1e3), st.floats(0, 10)), min_size=1, max_size=30))
def test_accumulator_mean_is_the_weighted_mean(pairs: list[tuple[float, float]]):
    kept = Accumulator()
    for value, weight in pairs:
        kept.record("x", value, reduction="mean", weight=weight)
    total = sum(w for _, w in pairs)
    if total == 0:
        assert kept.value("x") is None
    elif total > 1e-6:
        expected = sum(v * w for v, w in pairs) / total
        assert kept.value("x") == pytest.approx(expected, abs=1e-6)


# ---- files -------------------------------------------------------------------------------------------------------------------


def _lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_jsonl_writes_each_line_at_once(tmp_path: Path):
    sink = JsonlSink(tmp_path)
    sink.log_metrics(1, {"reward/mean": 0.5, "n": np.float32(2.0)})
    sink.log_sample(1, {"prompt": "1 + 1 =", "tokens": np.arange(2), "path": tmp_path})
    sink.log_event("warning", "slow")
    assert _lines(tmp_path / "metrics.jsonl") == [{"step": 1, "reward/mean": 0.5, "n": 2.0}]
    assert _lines(tmp_path / "samples.jsonl") == [
        {"step": 1, "prompt": "1 + 1 =", "tokens": [0, 1], "path": str(tmp_path)}
    ]
    assert _lines(tmp_path / "events.jsonl") == [{"after_s": 0.0, "level": "warning", "message": "slow"}]
    sink.close()


def test_jsonl_makes_no_file_for_what_never_came(tmp_path: Path):
    sink = JsonlSink(tmp_path, timeline=False)
    sink.log_span("learn", "step 1", 0.0, 1.0, {})
    sink.close()
    assert list(tmp_path.iterdir()) == []


def test_jsonl_appends_after_a_resume_and_survives_a_torn_line(tmp_path: Path):
    first = JsonlSink(tmp_path)
    first.log_metrics(1, {"x": 1.0})
    first.log_metrics(2, {"x": 2.0})
    first.log_span("learn", "step 1", 0.0, 1.0, {})
    first.close()
    for name in ("metrics.jsonl", "timeline.jsonl"):
        with (tmp_path / name).open("a") as file:
            file.write('{"step": 3, "x"')
    second = JsonlSink(tmp_path)
    second.log_metrics(2, {"x": 20.0})
    second.log_metrics(2, {"eval/reward": 0.5})
    second.log_span("learn", "step 2", 1.0, 2.0, {})
    second.close()
    assert read_metrics(tmp_path) == [{"step": 1, "x": 1.0}, {"step": 2, "x": 20.0, "eval/reward": 0.5}]
    assert [s["name"] for s in read_timeline(tmp_path)] == ["step 1", "step 2"]
    assert (tmp_path / "timeline.jsonl").read_text().count("[\n") == 1


def test_reading_what_is_not_there_gives_nothing(tmp_path: Path):
    assert list(read_lines(tmp_path / "metrics.jsonl")) == []
    assert read_metrics(tmp_path) == []


def test_timeline_is_a_chrome_trace(tmp_path: Path):
    """Closed as a JSON array it is what the trace event format asks for: microseconds, and a name for every lane."""
    sink = JsonlSink(tmp_path)
    sink.log_span("learn", "step 1", 0.5, 1.5, {"rows": 8})
    sink.log_span("sync", "publish 1", 1.5, 1.75, {})
    sink.close()
    text = (tmp_path / "timeline.jsonl").read_text()
    assert "".join(text.split()).startswith('[{"')
    events = json.loads(text.rstrip().removesuffix(",") + "]")
    spans = [e for e in events if e["ph"] == "X"]
    lanes = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    assert [(e["name"], e["ts"], e["dur"], lanes[e["tid"]]) for e in spans] == [
        ("step 1", 5e5, 1e6, "learn"),
        ("publish 1", 1.5e6, 2.5e5, "sync"),
    ]
    assert spans[0]["args"] == {"rows": 8}
    assert len({e["pid"] for e in events}) == 1


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 20)), max_size=40))
def test_lanes_never_hold_two_spans_at_once(spans: list[tuple[int, int]]):
    lanes, held = TimelineLanes(), {}
    for start, length in sorted(spans, key=lambda s: s[0] + s[1]):
        lane, is_new = lanes.place_span("generate", start, start + length)
        assert is_new == (lane not in held)
        for other_start, other_stop in held.get(lane, []):
            assert start >= other_stop or start + length <= other_start
        held.setdefault(lane, []).append((start, start + length))


# ---- screen ------------------------------------------------------------------------------------------------------------------


def _screen(*, terminal: bool) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=110, color_system=None, legacy_windows=False)
    return console, out


def test_console_prints_one_plain_line_a_step_where_there_is_no_terminal():
    console, out = _screen(terminal=False)
    sink = ConsoleSink(console, steps=10)
    for step in (1, 2):
        sink.log_metrics(step, _step(step))
        sink.log_span("learn", "step", 0.0, 1.0, {})
        sink.log_sample(step, {})
    sink.log_metrics(2, {"eval/reward": 0.75, "eval/version": 2.0, "eval/episodes": 20.0})
    sink.log_event("warning", "a [bold] sink failed")
    sink.close()
    lines = out.getvalue().splitlines()
    assert len(lines) == 4
    assert lines[0].startswith(
        "step  1/10  reward 0.250  lag 0.50 mean, 1 max (bound 2)  engine 200 tokens/s, idle 10%"
    )
    assert "learner 500 tokens/s, idle 40%, waits for groups 30%" in lines[0]
    assert "left" not in lines[0]
    assert lines[1].endswith("after 10 s  left 40 s")
    assert lines[2].startswith("  held-out 0.750 at version 2, 20 episodes")
    assert lines[3] == "warning: a [bold] sink failed"


def test_console_draws_a_table_on_a_terminal_and_leaves_it_standing():
    console, out = _screen(terminal=True)
    sink = ConsoleSink(console, steps=10, title="runs/x")
    sink.log_span("generate", "group 0", 0.0, 1.0, {})
    sink.log_metrics(0, {"eval/reward": 0.5, "eval/version": 0.0})
    sink.log_metrics(1, _step(1))
    sink.log_event("warning", "careful")
    sink.close()
    sink.close()
    last = out.getvalue().rsplit("runs/x", 1)[1]
    for part in (
        "1 of 10",
        "0.250   (first 0.250)",
        "0.500 at version 0",
        "bound 2",
        "200 tokens/s",
        "8 trained",
        "2 ready",
    ):
        assert part in last
    assert "careful" in out.getvalue()


def test_view_counts_time_left_at_the_pace_of_the_last_steps():
    view = RunView(steps=20)
    assert view.eta_s is None
    for step, elapsed_s in ((1, 100.0), (2, 104.0), (3, 108.0)):
        view.update(step, _step(step, time__elapsed_s=elapsed_s))
    assert view.eta_s == 17 * 4.0
    view.update(20, _step(20, time__elapsed_s=176.0))
    assert view.eta_s == 0.0


def test_view_shows_what_each_of_several_agents_earned():
    view = RunView(steps=10)
    values = {"version/learner": 1.0, "reward/agent/first": 0.5, "reward/agent/second": -0.5}
    view.update(1, values)
    assert "reward first 0.500, second -0.500  lag" in view.format_line(values)


def test_view_shows_what_it_knows_before_the_first_step():
    view = RunView(steps=5, done=3)
    assert "reward -" in view.format_line(STEP)
    console, out = _screen(terminal=False)
    console.print(view.build_table("t"))
    assert "3 of 5" in out.getvalue()


def test_spark_is_scaled_between_least_and_greatest():
    from collections import deque

    assert sparkline(deque([0.0, 0.5, 1.0])) in {"▁▄█", "▁▅█"}
    assert sparkline(deque([0.3, 0.3])) == "▁▁"
    assert sparkline(deque()) == ""


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "0 s"),
        (59.4, "59 s"),
        (59.6, "1 min 00 s"),
        (187, "3 min 07 s"),
        (3600, "1 h 00 min"),
        (7500, "2 h 05 min"),
    ],
)
def test_duration_reads_well(seconds: float, text: str):
    assert format_duration(seconds) == text


# ---- summary -----------------------------------------------------------------------------------------------------------------


def test_summary_says_first_and_last_rates_lag_and_counts():
    summary = SummarySink()
    summary.log_metrics(0, {"eval/reward": 0.2, "eval/version": 0.0})
    summary.log_metrics(1, _step(1, reward__mean=0.1, lag__mean=0.0, lag__max=0.0))
    summary.log_metrics(2, _step(2, reward__mean=0.5, lag__mean=1.0, lag__max=2.0))
    summary.log_metrics(2, {"eval/reward": 0.6, "eval/version": 2.0})
    summary.log_metrics(2, {"eval/reward": 0.4, "eval/version": 2.0})
    summary.log_event("warning", "x")
    summary.log_event("info", "y")
    lines = dict(summary.summary_lines(ended="all taken", counts={"trained": 16, "filtered": 3}))
    assert lines["steps"] == "2 (all taken)"
    assert lines["reward"] == "0.100 -> 0.500"
    assert lines["held-out"] == "0.200 -> 0.400   (best 0.600; last at version 2)"
    assert lines["throughput"] == "12.80 samples/s, 64 tokens/s over 10 s"
    assert lines["lag"] == "0.50 mean, 2 max (bound 2), in versions"
    assert lines["idle"] == "engine 10%, learner 40%"
    assert lines["prompts"] == "16 trained, 3 filtered, 0 failed, 0 stale, 0 cancelled"
    assert lines["warnings"].startswith("1,")


ADVICE = "they waited for one another: a larger staleness.max lets generation run further ahead"


@pytest.mark.parametrize(
    ("changed", "steps", "advised"),
    [
        ({}, 5, True),
        ({}, 4, False),
        ({"engine/idle_fraction": 0.05}, 5, False),
        ({"learner/idle_fraction": 0.05}, 5, False),
        ({"wait/learner_groups_fraction": 0.0}, 5, False),
        ({"wait/feed_slot_fraction": 0.0}, 5, False),
    ],
)
def test_summary_advises_more_ahead_where_both_sides_wait_for_latency(
    changed: dict[str, float], steps: int, advised: bool
):
    waits = {"wait/learner_groups_fraction": 0.3, "wait/feed_slot_fraction": 0.6, "engine/idle_fraction": 0.4}
    summary = SummarySink()
    for step in range(1, steps + 1):
        summary.log_metrics(step, {**_step(step), **waits, **changed})
    assert (("", ADVICE) in summary.summary_lines(ended="all taken", counts={})) == advised


def test_summary_gives_no_advice_that_cannot_be_followed():
    waits = {"wait/learner_groups_fraction": 0.3, "wait/feed_slot_fraction": 0.6, "engine/idle_fraction": 0.4}
    summary = SummarySink(may_run_ahead=False)
    for step in range(1, 9):
        summary.log_metrics(step, {**_step(step), **waits})
    assert ("", ADVICE) not in summary.summary_lines(ended="all taken", counts={})


def test_summary_of_a_resumed_run_covers_the_part_before(tmp_path: Path):
    sink = JsonlSink(tmp_path)
    sink.log_metrics(1, _step(1, reward__mean=0.1, not_a_number=float("nan")))
    sink.close()
    summary = SummarySink()
    summary.add_records(read_metrics(tmp_path))
    assert summary.step == 1
    summary.log_metrics(2, _step(2, reward__mean=0.9))
    assert dict(summary.summary_lines(ended="stopped", counts={}))["reward"] == "0.100 -> 0.900"


def test_summary_of_nothing_is_short():
    assert SummarySink().summary_lines(ended="stopped", counts={}) == [("steps", "0 (stopped)")]


@pytest.mark.parametrize("terminal", [True, False])
def test_sinks_keep_their_contract(tmp_path: Path, terminal: bool):
    check_sink(lambda: JsonlSink(tmp_path))
    check_sink(SummarySink)
    check_sink(lambda: ConsoleSink(_screen(terminal=terminal)[0], steps=2))


def test_record_is_taken_back_to_a_checkpoint(tmp_path: Path):
    sink = JsonlSink(tmp_path)
    for step in (0, 1, 2, 3):
        if step:
            sink.log_metrics(step, {"version/learner": step})
            sink.log_sample(step, {"prompt_id": f"0/{step}"})
            sink.log_span("learn", f"step {step}", step - 1.0, float(step), {})
        sink.log_metrics(step, {"eval/episodes": 1.0, "eval/version": step})
    sink.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "torn')
    for evaluated, kept in ((True, [0, 1, 2]), (False, [0, 1])):
        rewind_records(tmp_path, step=2, evaluated=evaluated, elapsed_s=2.0)
        lines = list(read_lines(tmp_path / "metrics.jsonl"))
        assert [line["step"] for line in lines if "version/learner" in line] == [1, 2]
        assert [line["step"] for line in lines if "eval/episodes" in line] == kept
    assert [line["step"] for line in read_lines(tmp_path / "samples.jsonl")] == [1, 2]
    assert [span["name"] for span in read_timeline(tmp_path)] == ["step 1", "step 2"]
    assert (tmp_path / "timeline.jsonl").read_text().startswith("[\n{")
    again = JsonlSink(tmp_path)
    again.log_span("learn", "step 3", 2.0, 3.0, {})
    again.log_metrics(3, {"version/learner": 3})
    again.close()
    assert [span["name"] for span in read_timeline(tmp_path)] == ["step 1", "step 2", "step 3"]
    assert [line["step"] for line in read_metrics(tmp_path)] == [0, 1, 2, 3]
    assert not list(tmp_path.glob(".*"))
