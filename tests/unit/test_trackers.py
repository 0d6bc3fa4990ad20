"""Trackers: beside the loop, under TRL's names, and never the end of a run. The libraries themselves write, and are read back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from corrente.config import Observe, RunConfig
from corrente.errors import ConfigError
from corrente.observe import trackers
from corrente.observe.background_sink import BackgroundSink
from corrente.observe.fanout import Fanout
from corrente.observe.trackers import SampleTable, open_trackers
from corrente.observe.trl_names import TRL_NAMES, to_trl_names

STEP = {"reward/mean": 0.5, "reward/std": 0.1, "reward/closeness": 0.25, "train/loss": -0.125, "lag/bound": 1.0}
SAMPLE = {
    "prompt": "1 + 1 =",
    "completion": "2\n|",
    "reward": 1.0,
    "scores": {"closeness": 1.0},
    "extra": {"found": "2"},
    "tokens": 2,
}


class Kept:
    """A sink that remembers what it was told."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.closed = False

    def log_metrics(self, step: int, values: Mapping[str, float]) -> None:
        self.told.append((step, values))

    def log_span(self, track: str, name: str, start_s: float, stop_s: float, attrs: Mapping[str, Any]) -> None: ...

    def log_sample(self, step: int, sample: Mapping[str, Any]) -> None:
        self.told.append((step, sample))

    def log_event(self, level: str, message: str) -> None:
        self.told.append((level, message))

    def close(self) -> None:
        self.closed = True


class Failing(Kept):
    def log_metrics(self, step: int, values: Mapping[str, float]) -> None:
        raise ConnectionError("no network")


# ---- beside the loop ---------------------------------------------------------------------------------------------------------


def test_calls_reach_the_sink_in_order_and_closing_waits_for_them():
    kept = Kept()
    beside = BackgroundSink(lambda: kept, name="kept")
    values = {"a": 1.0}
    beside.log_metrics(1, values)
    values["a"] = 2.0
    beside.log_sample(1, SAMPLE)
    beside.log_event("warning", "x")
    beside.close()
    beside.close()
    assert kept.told == [(1, {"a": 1.0}), (1, SAMPLE), ("warning", "x")]
    assert kept.closed


@pytest.mark.parametrize("kind", ["makes", "tells", "exits"])
def test_tracker_that_fails_costs_a_warning_and_nothing_else(kind: str):
    def fails() -> Kept:
        raise (ImportError if kind == "makes" else SystemExit)("no network")

    broken = BackgroundSink(Failing if kind == "tells" else fails, name="broken")
    kept = Kept()
    sinks = Fanout([broken, kept])
    sinks.log_metrics(1, STEP)
    for thread in threading.enumerate():
        if thread.name == "tracker broken":
            thread.join(10)
    sinks.log_metrics(2, STEP)
    sinks.log_metrics(3, STEP)
    sinks.close()
    warnings = [told for told in kept.told if told[0] == "warning"]
    assert len(warnings) == 1
    assert "broken failed and is not used any more" in warnings[0][1]
    assert [told[0] for told in kept.told if told[0] != "warning"] == [1, 2, 3]
    assert kept.closed


def test_tracker_that_hangs_is_left_behind_in_bounded_time():
    never, begun = threading.Event(), threading.Event()

    def hangs() -> Kept:
        begun.set()
        never.wait()
        return Kept()

    beside = BackgroundSink(hangs, name="stuck", close_timeout_s=0.05)
    begun.wait(10)
    for step in range(5):
        beside.log_metrics(step, STEP)
    with pytest.raises(TimeoutError, match=r"stuck was not done within 0\.05 s, and is left behind"):
        beside.close()
    never.set()


def test_records_that_a_slow_tracker_cannot_take_are_dropped_and_said():
    go = threading.Event()
    kept = Kept()

    def slow() -> Kept:
        go.wait()
        return kept

    beside = BackgroundSink(slow, name="slow", max_queued=2)
    for step in range(5):
        beside.log_metrics(step, STEP)
    go.set()
    with pytest.raises(RuntimeError, match="slow was too slow: 3 records are missing there"):
        beside.close()
    assert [step for step, _ in kept.told] == [0, 1]


# ---- names and tables --------------------------------------------------------------------------------------------------------


def test_metrics_get_trls_names_where_it_has_them():
    given = {**STEP, "reward_std/closeness": 0.2, "logged/digits": 3.0, "eval/reward": 0.7, "reward/trained_mean": 0.1}
    assert to_trl_names(given) == {
        "train/reward": 0.5,
        "train/reward_std": 0.1,
        "train/rewards/closeness/mean": 0.25,
        "train/rewards/closeness/std": 0.2,
        "train/digits": 3.0,
        "train/loss": -0.125,
        "eval/reward": 0.7,
        "lag/bound": 1.0,
        "reward/trained_mean": 0.1,
    }
    assert len(set(TRL_NAMES.values())) >= len(TRL_NAMES) - 1, (
        "two of ours may share a name only where one replaced the other"
    )


def test_samples_become_a_table_with_a_column_per_function_and_extra():
    samples = SampleTable()
    samples.add_sample(3, SAMPLE)
    samples.add_sample(3, {**SAMPLE, "scores": {}, "extra": {"other": 1}})
    columns, rows = samples.take_rows()
    assert columns == ["step", "prompt", "completion", "reward", "closeness", "found", "other"]
    assert rows == [
        [3, "1 + 1 =", "2\n|", 1.0, 1.0, "2", None],
        [3, "1 + 1 =", "2\n|", 1.0, None, None, 1],
    ]
    assert samples.take_rows()[1] == []


def test_trackers_are_checked_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch):
    def config(*names: Any) -> RunConfig:
        return RunConfig(observe=Observe(trackers=names))

    with pytest.raises(ConfigError, match=r"observe\.trackers: 'wandb' is there twice"):
        trackers.check(config("wandb", "wandb"))
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r'trackio is not installed: pip install "corrente\[trackio\]"'):
        trackers.check(config("trackio"))


# ---- the libraries -----------------------------------------------------------------------------------------------------------


def track_run(name: str, folder: Path, *, done: int = 0) -> None:
    config = RunConfig(observe=Observe(trackers=(name,), project="tests", run_name="one"))  # type: ignore[arg-type]
    (sink,) = open_trackers(config, folder, done=done)
    for step in (done + 1, done + 2):
        sink.log_sample(step, SAMPLE)
        sink.log_metrics(step, {**STEP, "reward/mean": step / 10})
    sink.log_metrics(done + 1, {"eval/reward": 0.75})
    sink.log_event("warning", "slow")
    sink.close()


@pytest.mark.slow
def test_tensorboard_reads_what_was_written(tmp_path: Path):
    pytest.importorskip("tensorboard")
    track_run("tensorboard", tmp_path)
    track_run("tensorboard", tmp_path, done=1)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    rewards = [(e.step, round(e.value, 6)) for e in events.Scalars("train/reward")]
    assert rewards == [(1, 0.1), (2, 0.2), (3, 0.3)], "step 2 of the part that was taken back is void"
    assert {"train/loss", "train/rewards/closeness/mean", "eval/reward", "lag/bound"} <= set(events.Tags()["scalars"])
    (text,) = events.Tensors("completions/text_summary")[-1].tensor_proto.string_val
    assert b"| 3 | 1 + 1 = | 2\xe2\x8f\x8e\\| | 1 | 1 | 2 |" in text
    assert "events/warning/text_summary" in events.Tags()["tensors"]


def _in_a_process(tmp_path: Path, code: str, **env: str) -> str:
    """What a program printed in which these libraries may leave threads, hooks and files in a home of their own."""
    head = f"""
import json, sys
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_trackers import track_run
folder = Path({str(tmp_path)!r})
"""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("WANDB_", "TRACKIO_"))}
    done = subprocess.run(
        [sys.executable, "-c", head + code],
        capture_output=True,
        text=True,
        timeout=300,
        env={**clean, "HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", **env},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
def test_wandb_writes_offline_without_a_key(tmp_path: Path):
    pytest.importorskip("wandb")
    assert _in_a_process(tmp_path, 'track_run("wandb", folder)') == "", "the terminal is ours"
    (record,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    written = record.read_bytes()
    for name in ("train/reward", "train/rewards/closeness/mean", "eval/reward", "train/global_step", "completions"):
        assert name.encode() in written
    tables = [json.loads(path.read_text()) for path in tmp_path.glob("wandb/offline-run-*/files/media/table/*.json")]
    assert len(tables) == 2
    assert tables[0]["columns"] == ["step", "prompt", "completion", "reward", "closeness", "found"]


@pytest.mark.slow
def test_trackio_reads_what_was_written(tmp_path: Path):
    pytest.importorskip("trackio")
    code = """
track_run("trackio", folder)
track_run("trackio", folder, done=2)
from trackio.sqlite_storage import SQLiteStorage
(run,) = SQLiteStorage.get_runs("tests")
print(json.dumps([run, SQLiteStorage.get_logs("tests", run)], default=str))
"""
    (line,) = _in_a_process(tmp_path, code, TRACKIO_DIR=str(tmp_path / "trackio")).splitlines()
    run, logs = json.loads(line)
    assert run.startswith("one-")
    assert [log["train/reward"] for log in logs if "train/reward" in log] == [0.1, 0.2, 0.3, 0.4]
    assert any("eval/reward" in log for log in logs)
    assert any("completions" in log for log in logs)
