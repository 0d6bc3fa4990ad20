"""Whether a learner that was saved and loaded goes on as one that never stopped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from corrente.config import RunConfig
from corrente.data.types import Batch
from corrente.learner.core import TorchLearner


def weights(core: TorchLearner) -> dict[str, torch.Tensor]:
    """As they are now, whatever it learns later."""
    return {name: tensor.clone() for name, tensor in core.tensors().items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """Bit by bit."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def check_continues(config: RunConfig, folder: Path, build_batch: Callable[..., Any], *first: Batch) -> None:
    """After the batches ``first``, one more step gives equal weights and reports with a save and a load between and without."""
    straight, stopped = TorchLearner(config), TorchLearner(config)
    for core in (straight, stopped):
        for batch in first:
            core.step(batch)
    (folder / "saved").mkdir()
    stopped.save(folder / "saved")
    resumed = TorchLearner(config)
    resumed.load(folder / "saved")
    reports = [core.step(build_batch(seed=2)) for core in (straight, resumed)]
    assert same(weights(straight), weights(resumed))
    for report in reports:
        report.pop("learner/busy_s")
    assert reports[0] == reports[1]
