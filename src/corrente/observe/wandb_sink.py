# pyright: basic
# The library has no types that strict checking could use.
"""Weights & Biases. The mode is what WANDB_MODE says; without that and without a key, offline: nothing is asked on the terminal.

Evaluations report a step that may lie behind the newest, so every record carries its step as "train/global_step", the axis of all
charts, as transformers does it. Offline runs are sent later with ``wandb sync``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import wandb  # pyright: ignore[reportMissingImports]

from corrente.observe.names import named
from corrente.observe.trackers import Samples, TrackerPlace

STEP = "train/global_step"
START_S = 25.0
"""Time the service gets to answer; at the end of the program wandb waits for it, too."""


class WandbSink:
    """Implements Sink. A run that is resumed goes on in the same run there."""

    def __init__(self, place: TrackerPlace) -> None:
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
        self._samples = Samples()

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        record: dict[str, Any] = {**named(values), STEP: step}
        columns, rows = self._samples.take()
        if rows:
            cells = [[cell if isinstance(cell, int | float | None) else str(cell) for cell in row] for row in rows]
            made: Any = wandb
            record["completions"] = made.Table(columns=columns, data=cells, allow_mixed_types=True)
        self._run.log(record)

    def span(self, track: str, name: str, start_s: float, stop_s: float, attrs: Mapping[str, Any]) -> None:
        pass

    def sample(self, step: int, sample: Mapping[str, Any]) -> None:
        self._samples.add(step, sample)

    def event(self, level: str, message: str) -> None:
        self._run.summary[f"last_{level}"] = message

    def close(self) -> None:
        self._run.finish()
