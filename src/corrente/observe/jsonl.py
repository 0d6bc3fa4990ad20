"""A run's record on disk, one JSON object a line, each line flushed as it is written.

    metrics.jsonl    {"step": 3, "reward/mean": 0.4, ...}; evaluations are lines of their own with the same step
    samples.jsonl    {"step": 3, "prompt": ..., "completion": ..., "reward": ..., ...}
    timeline.jsonl   Chrome trace events: open it in ui.perfetto.dev as it is
    events.jsonl     {"level": "warning", "message": ...}; only when there are any

A trace is a JSON array, so timeline.jsonl begins with a line "[" and its events end in a comma; the format allows the closing
bracket to be missing, which is what a file that grows needs. Spans of one track that overlap go to lanes of their own, for a
viewer nests what overlaps. ``read_lines`` and what is built on it leave out the line that a crash has torn.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

import msgspec

MICRO = 1e6
PROCESS = 1


class JsonlSink:
    """Implements Sink. Files are made when the first line is written, and appended to."""

    def __init__(self, folder: Path, *, timeline: bool = True) -> None:
        self._folder = folder
        self._timeline = timeline
        self._files: dict[str, TextIO] = {}
        self._lanes = Lanes()
        self._latest_s = 0.0

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        self._write("metrics.jsonl", {"step": step, **values})

    def span(self, track: str, name: str, start_s: float, stop_s: float, attrs: Mapping[str, Any]) -> None:
        self._latest_s = max(self._latest_s, stop_s)
        if not self._timeline:
            return
        lane, is_new = self._lanes.place(track, start_s, stop_s)
        if is_new:
            label = {"ph": "M", "name": "thread_name", "pid": PROCESS, "tid": lane, "args": {"name": track}}
            self._write("timeline.jsonl", label, end=",\n")
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
        self._write("timeline.jsonl", event, end=",\n")

    def sample(self, step: int, sample: Mapping[str, Any]) -> None:
        self._write("samples.jsonl", {"step": step, **sample})

    def event(self, level: str, message: str) -> None:
        self._write("events.jsonl", {"after_s": self._latest_s, "level": level, "message": message})

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _write(self, name: str, record: Mapping[str, Any], *, end: str = "\n") -> None:
        file = self._files.get(name) or self._open(name)
        file.write(msgspec.json.encode(record, enc_hook=_plain).decode() + end)
        file.flush()

    def _open(self, name: str) -> TextIO:
        path = self._folder / name
        torn = _is_torn(path)
        file = path.open("a", encoding="utf-8")
        self._files[name] = file
        if torn:
            file.write("\n")  # what a crash left of a line stays alone on it
        if name == "timeline.jsonl" and path.stat().st_size == 0:
            file.write("[\n")
        return file


class Lanes:
    """Places spans that arrive in order of their end: a lane per track, and more where spans of a track overlap."""

    def __init__(self) -> None:
        self._ends: dict[str, list[tuple[int, float]]] = {}
        self._count = 0

    def place(self, track: str, start_s: float, stop_s: float) -> tuple[int, bool]:
        """The lane's number, and whether it is new."""
        lanes = self._ends.setdefault(track, [])
        for at, (lane, end_s) in enumerate(lanes):
            if end_s <= start_s:
                lanes[at] = (lane, stop_s)
                return lane, False
        self._count += 1
        lanes.append((self._count, stop_s))
        return self._count, True


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a file, in order; none when it does not exist. Lines torn by a crash are left out."""
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
    """One record per step, in order of step: all lines of it together, the later ones winning.

    A run that was killed and resumed has taken some steps twice; the second time counts.
    """
    steps: dict[int, dict[str, Any]] = {}
    for record in read_lines(folder / "metrics.jsonl"):
        steps.setdefault(int(record["step"]), {}).update(record)
    return [steps[step] for step in sorted(steps)]


def read_timeline(folder: Path) -> list[dict[str, Any]]:
    """The spans of a run: name, track, start_s, stop_s, attrs."""
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


def rewind(folder: Path, *, step: int, evaluated: bool, elapsed_s: float) -> None:
    """Take back what was recorded after the checkpoint of ``step``, which a resumed run records again: steps and samples past
    it, spans that end after ``elapsed_s``, and, unless that was ``evaluated``, the evaluation of its weights. Torn lines go too.
    Events stay. Each file is replaced whole, so a crash in between leaves the old one or the new one."""

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
                file.write(msgspec.json.encode(record).decode() + end)
    aside.replace(path)


def _is_torn(path: Path) -> bool:
    """Whether the file's last line has no end."""
    if not path.exists() or not path.stat().st_size:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"


def _plain(value: Any) -> Any:
    """What msgspec does not know: a NumPy scalar or array as numbers, anything else as it prints."""
    return value.tolist() if hasattr(value, "tolist") else str(value)
