"""The learner: one optimizer step per batch, and its weights on request."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from corrente.data.types import Batch, Metrics

Pulse = Callable[[], None]
"""A function that a step calls with each piece of its work, so that a slow step can be told from one that hangs."""


def no_pulse() -> None:
    """The pulse of a step whose progress nobody follows."""


class Learner(Protocol):
    """Contract.

    - ``step`` learns from ``batch``, by one update or by ``algo.num_iterations``, and returns metrics (see learner/metrics.py for
      names). A batch without gradient (no rows) leaves weights and optimizer untouched. Non-finite loss or gradient raises
      DivergedError and leaves the weights as they were before that update.
    - ``save`` writes model, optimizer, scheduler and RNG into an existing empty directory; ``load`` restores them from one.
      Both leave the learner usable when they fail (CheckpointError).
    - ``progress`` counts the pieces of work done so far, of a step that is going on too: it tells a learner that computes from
      one that hangs. It waits for nothing, and answers at any time.
    - Weights leave through the sync, which is given the learner by the runtime.
    """

    async def step(self, batch: Batch) -> Metrics: ...

    async def save(self, path: Path) -> None: ...

    async def load(self, path: Path) -> None: ...

    def progress(self) -> int: ...
