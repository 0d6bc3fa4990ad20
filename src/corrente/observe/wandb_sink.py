# pyright: basic
# The library has no types that strict checking could use.
"""A sink for Weights & Biases. WANDB_MODE sets the mode; without it and without a key it is offline, and never asks a question.

wandb's own step must not decrease, but an evaluation may report a step older than the newest. So every record carries its step as
"train/global_step", which is the axis of all charts, as in transformers. Offline runs are sent later with ``wandb sync``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import wandb  # pyright: ignore[reportMissingImports]

from corrente.observe.trackers import SampleTable, TrackerRun
from corrente.observe.trl_names import to_trl_names

STEP = "train/global_step"
START_S = 25.0
"""Seconds that the service gets to answer; wandb waits for it at the end of the program as well."""


class WandbSink:
    """Implements Sink. A resumed run continues the same wandb run."""

    def __init__(self, place: TrackerRun) -> None:
        known: Any = wandb
        known.setup(settings=known.Settings(silent=True))
        offline = not os.environ.get("WANDB_MODE") and not known.login(prompt=False, verify=False)
        self._run: Any = known.init(
            project=place.project,
            name=place.name,
            id=place.key,
            dir=str(place.folder),
            config=place.config,
            resume="allow",
            mode="offline" if offline else None,
            settings=known.Settings(silent=True, console="off", init_timeout=START_S),
        )
        self._run.define_metric("*", step_metric=STEP, step_sync=True)
        self._samples = SampleTable()

    def log_metrics(self, step: int, values: Mapping[str, float]) -> None:
        record: dict[str, Any] = {**to_trl_names(values), STEP: step}
        columns, rows = self._samples.take_rows()
        if rows:
            cells = [[cell if isinstance(cell, int | float | None) else str(cell) for cell in row] for row in rows]
            made: Any = wandb
            record["completions"] = made.Table(columns=columns, data=cells, allow_mixed_types=True)
        self._run.log(record)

    def log_span(self, track: str, name: str, start_s: float, stop_s: float, attrs: Mapping[str, Any]) -> None:
        pass

    def log_sample(self, step: int, sample: Mapping[str, Any]) -> None:
        self._samples.add_sample(step, sample)

    def log_event(self, level: str, message: str) -> None:
        self._run.summary[f"last_{level}"] = message

    def close(self) -> None:
        self._run.finish()
