# pyright: basic
# The library has no types that strict checking could use.
"""A sink for trackio: a local dashboard (``trackio show``), or a Space where its environment variables name one."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping
from typing import Any

import trackio  # pyright: ignore[reportMissingImports]

from corrente.observe.trackers import SampleTable, TrackerRun
from corrente.observe.trl_names import to_trl_names


class TrackioSink:
    """Implements Sink. A resumed run continues the same trackio run. trackio's own prints are suppressed."""

    def __init__(self, place: TrackerRun) -> None:
        self._samples = SampleTable()
        made: Any = trackio
        with contextlib.redirect_stdout(io.StringIO()):
            self._run: Any = made.init(
                project=place.project,
                name=f"{place.name}-{place.key[:6]}",
                config=place.config,
                resume="allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )

    def log_metrics(self, step: int, values: Mapping[str, float]) -> None:
        record: dict[str, Any] = to_trl_names(values)
        columns, rows = self._samples.take_rows()
        if rows:
            from pandas import DataFrame

            made: Any = trackio
            cells = [[cell if isinstance(cell, int | float | None) else str(cell) for cell in row] for row in rows]
            record["completions"] = made.Table(dataframe=DataFrame(cells, columns=columns))
        self._run.log(metrics=record, step=step)

    def log_span(self, track: str, name: str, start_s: float, stop_s: float, attrs: Mapping[str, Any]) -> None:
        pass

    def log_sample(self, step: int, sample: Mapping[str, Any]) -> None:
        self._samples.add_sample(step, sample)

    def log_event(self, level: str, message: str) -> None:
        pass

    def close(self) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            self._run.finish()
