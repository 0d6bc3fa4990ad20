"""Write a run's record to disk: one JSON object per line, each flushed as it is written.

    metrics.jsonl    {"step": 3, "reward/mean": 0.4, ...}; evaluations are lines of their own with the same step
    samples.jsonl    {"step": 3, "prompt": ..., "completion": ..., "reward": ..., ...}
    timeline.jsonl   Chrome trace events: open it in ui.perfetto.dev as it is
    events.jsonl     {"level": "warning", "message": ...}; only when there are any

A trace is a JSON array, so timeline.jsonl begins with a line "[" and its events end in a comma; the format allows the closing
bracket to be missing, as a growing file needs. Overlapping spans of one track go to separate lanes, because a viewer draws
overlapping spans of one lane as nested. ``read_lines`` and the functions built on it skip a line that a crash left incomplete.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

import msgspec

from corrente.common.plain_data import json_plain

MICRO = 1e6
PROCESS = 1


class JsonlSink:
    """Implements Sink. A file is created when its first line is written; an existing one is appended to."""

    def __init__(self, folder: Path, *, timeline: bool = True) -> None:
        self._folder = folder
        self._timeline = timeline
        self._files: dict[str, TextIO] = {}
        self._lanes = TimelineLanes()
        self._latest_s = 0.0

    def log_metrics(self, step: int, values: Mapping[str, float]) -> None:
        self._write_line("metrics.jsonl", {"step": step, **values})

    def log_span(self, track: str, name: str, start_s: float, stop_s: float, attrs: Mapping[str, Any]) -> None:
        self._latest_s = max(self._latest_s, stop_s)
        if not self._timeline:
            return
        lane, is_new = self._lanes.place_span(track, start_s, stop_s)
        if is_new:
            label = {"ph": "M", "name": "thread_name", "pid": PROCESS, "tid": lane, "args": {"name": track}}
            self._write_line("timeline.jsonl", label, end=",\n")
        event = {
            "ph": "X",
            "name": name,
            "cat": track,
            "pid": PROCESS,
            "tid": lane,
            "ts": start_s * MICRO,
            "dur": (stop_s - start_s) * MICRO,
            "args": dict(attrs),
        }
        self._write_line("timeline.jsonl", event, end=",\n")

    def log_sample(self, step: int, sample: Mapping[str, Any]) -> None:
        self._write_line("samples.jsonl", {"step": step, **sample})

    def log_event(self, level: str, message: str) -> None:
        self._write_line("events.jsonl", {"after_s": self._latest_s, "level": level, "message": message})

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _write_line(self, name: str, record: Mapping[str, Any], *, end: str = "\n") -> None:
        file = self._files.get(name) or self._open_file(name)
        file.write(_encode_line(record) + end)
        file.flush()

    def _open_file(self, name: str) -> TextIO:
        path = self._folder / name
        torn = _is_torn(path)
        file = path.open("a", encoding="utf-8")
        self._files[name] = file
        if torn:
            file.write("\n")  # so that the line which a crash left incomplete does not spoil the next one
        if name == "timeline.jsonl" and path.stat().st_size == 0:
            file.write("[\n")
        return file


class TimelineLanes:
    """Assigns spans, which arrive in order of their end, to lanes: one per track, and more where its spans overlap."""

    def __init__(self) -> None:
        self._ends: dict[str, list[tuple[int, float]]] = {}
        self._count = 0

    def place_span(self, track: str, start_s: float, stop_s: float) -> tuple[int, bool]:
        """Place a span; returns the lane's number, and True when the lane is new."""
        lanes = self._ends.setdefault(track, [])
        for at, (lane, end_s) in enumerate(lanes):
            if end_s <= start_s:
                lanes[at] = (lane, stop_s)
                return lane, False
        self._count += 1
        lanes.append((self._count, stop_s))
        return self._count, True


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a file in order; none when it does not exist. Lines that a crash left incomplete are skipped."""
    if not path.exists():
        return
    with path.open("rb") as lines:
        for line in lines:
            try:
                record = msgspec.json.decode(line.strip().removesuffix(b","))
            except msgspec.DecodeError:
                continue
            if isinstance(record, dict):
                yield record


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Read metrics.jsonl of a run folder as one record per step, in order; later lines of a step override earlier ones.

    A run that was killed and resumed has taken some steps twice; the second time counts.
    """
    steps: dict[int, dict[str, Any]] = {}
    for record in read_lines(folder / "metrics.jsonl"):
        steps.setdefault(int(record["step"]), {}).update(record)
    return [steps[step] for step in sorted(steps)]


def read_timeline(folder: Path) -> list[dict[str, Any]]:
    """Read the spans of a run folder: dicts of name, track, start_s, stop_s and attrs."""
    return [
        {
            "name": event["name"],
            "track": event["cat"],
            "start_s": event["ts"] / MICRO,
            "stop_s": (event["ts"] + event["dur"]) / MICRO,
            "attrs": event["args"],
        }
        for event in read_lines(folder / "timeline.jsonl")
        if event.get("ph") == "X"
    ]


def rewind_records(folder: Path, *, step: int, evaluated: bool, elapsed_s: float) -> None:
    """Remove the records written after the checkpoint of ``step``, since a resumed run writes them again.

    Removed are steps and samples after it, spans that end after ``elapsed_s``, incomplete lines and, unless the checkpoint was
    ``evaluated``, the evaluation of its weights. Events stay. Each file is replaced as a whole, so a crash leaves the old one or
    the new one.
    """

    def stays(record: dict[str, Any]) -> bool:
        repeated = "eval/episodes" in record and not evaluated
        return int(record["step"]) < step + (not repeated)

    _keep_lines(folder / "metrics.jsonl", stays)
    _keep_lines(folder / "samples.jsonl", lambda record: int(record["step"]) <= step)
    _keep_lines(
        folder / "timeline.jsonl",
        lambda event: event.get("ph") != "X" or event["ts"] + event["dur"] <= elapsed_s * MICRO,
        head="[\n",
        end=",\n",
    )


def _keep_lines(path: Path, stays: Callable[[dict[str, Any]], bool], *, head: str = "", end: str = "\n") -> None:
    if not path.exists():
        return
    aside = path.with_name(f".{path.name}.writing")
    with aside.open("w", encoding="utf-8") as file:
        file.write(head)
        for record in read_lines(path):
            if stays(record):
                file.write(_encode_line(record) + end)
    aside.replace(path)


def _is_torn(path: Path) -> bool:
    """True when the file's last line is incomplete."""
    if not path.exists() or not path.stat().st_size:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"


def _encode_line(record: Mapping[str, Any]) -> str:
    """The record as JSON, whatever is in it."""
    try:
        return msgspec.json.encode(record).decode()
    except (TypeError, ValueError, OverflowError, RecursionError):
        return msgspec.json.encode(json_plain(dict(record))).decode()
