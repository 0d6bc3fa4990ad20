"""The run's metrics as a log of TRL's: its names, and means over logging_steps. metrics.jsonl has everything, step by step.

Names are those of the trackers (observe/trl_names.py), as TRL's logs have them: "train/reward" is "reward" there,
"eval/reward" is "eval_reward". Of what TRL has no name for a log has the few in ``OURS``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from corrente.observe import trl_names

SAME = ("train/loss", "train/grad_norm", "train/entropy", "reward/trained_mean")
"""What TRL calls the same, and the reward of what was trained on."""
TRAINED = "reward/trained_mean"
DATASET = re.compile(r"eval/(.+)/tokens_mean")
"""What is measured of every dataset, where there are several."""
OURS = (
    *("lag/bound", "version/live", "ratio/ess"),
    *("engine/idle_fraction", "learner/idle_fraction", "engine/tokens_per_s", "learner/tokens_per_s"),
)


def logged(values: Mapping[str, float]) -> dict[str, float]:
    """A step's metrics: what TRL has, under its names, and a few of ours."""
    out: dict[str, float] = {}
    for ours, value in values.items():
        name = next(iter(trl_names.to_trl_names({ours: value})))
        if name != ours or ours in SAME or ours in OURS:
            out[name.removeprefix("train/")] = value
    return out


def evaluated(values: Mapping[str, float]) -> dict[str, float]:
    """An evaluation's metrics, all beginning with eval_; those of one of several datasets with eval_NAME_."""
    datasets = [found[1] for name in values if (found := DATASET.fullmatch(name))]
    out: dict[str, float] = {}
    for ours, value in values.items():
        dataset = next((name for name in datasets if ours.startswith(f"eval/{name}/")), "")
        part = f"{dataset}/" if dataset else ""
        name = next(iter(trl_names.to_trl_names({f"eval/{ours.removeprefix(f'eval/{part}')}": value})))
        out[f"eval_{part.replace('/', '_')}{name.removeprefix('eval/')}"] = value
    return out


class LogWindow:
    """The means of what was measured since the last log; ``num_tokens`` since the beginning."""

    def __init__(self, *, tokens: float = 0.0) -> None:
        """``tokens``: what a run that goes on had seen before."""
        self._sums: dict[str, tuple[float, int]] = {}
        self._tokens = float(tokens)

    def add(self, values: Mapping[str, float]) -> None:
        """The metrics of one step."""
        self._tokens += values.get("samples/tokens", 0.0)
        for name, value in logged(values).items():
            if math.isfinite(value):
                total, number = self._sums.get(name, (0.0, 0))
                self._sums[name] = (total + value, number + 1)

    def flush(self) -> dict[str, float]:
        """The log of the window, which begins anew."""
        means = {name: total / number for name, (total, number) in self._sums.items()}
        trained = means.pop(TRAINED, None)
        if trained is not None:
            means.setdefault("reward", trained)  # nothing was scored in this window: all of it was generated ahead
        self._sums = {}
        return {**means, "num_tokens": self._tokens}
