# pyright: basic
# The library has no types that strict checking could use.
"""trackio: a local dashboard (``trackio show``), or a Space where its environment variables name one."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping
from typing import Any

import trackio  # pyright: ignore[reportMissingImports]

from corrente.observe.names import named
from corrente.observe.trackers import Samples, TrackerPlace


class TrackioSink:
    """Implements Sink. A run that is resumed goes on in the same run there. What trackio prints is left out."""

    def __init__(self, place: TrackerPlace) -> None:
        self._samples = Samples()
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

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        record: dict[str, Any] = named(values)
        columns, rows = self._samples.take()
        if rows:
            from pandas import DataFrame

            made: Any = trackio
            cells = [[cell if isinstance(cell, int | float | None) else str(cell) for cell in row] for row in rows]
            record["completions"] = made.Table(dataframe=DataFrame(cells, columns=columns))
        self._run.log(metrics=record, step=step)

    def span(self, track: str, name: str, start_s: float, stop_s: float, attrs: Mapping[str, Any]) -> None:
        pass

    def sample(self, step: int, sample: Mapping[str, Any]) -> None:
        self._samples.add(step, sample)

    def event(self, level: str, message: str) -> None:
        pass

    def close(self) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            self._run.finish()
