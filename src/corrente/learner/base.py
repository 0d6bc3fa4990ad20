"""Who trains: one optimizer step per batch, and its weights on request."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from corrente.types import Batch, Metrics


class Learner(Protocol):
    """Contract.

    - ``step`` takes one optimizer step from ``batch`` and returns metrics (see learner/metrics.py for names). A batch without
      gradient (no rows) leaves weights and optimizer untouched. Non-finite loss or gradient raises DivergedError and
      leaves the weights as they were.
    - ``save`` writes model, optimizer, scheduler and RNG into an existing empty directory; ``load`` restores them from one.
      Both leave the learner usable when they fail (CheckpointError).
    - Weights leave through the sync, which is given the learner by the runtime.
    """

    async def step(self, batch: Batch) -> Metrics: ...

    async def save(self, path: Path) -> None: ...

    async def load(self, path: Path) -> None: ...
