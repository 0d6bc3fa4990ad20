"""The parts of the pipeline: one per stage and axis, and the numbers of the plan.

``entrypoints.assemble`` builds them from a config; examples/loop.py builds them by hand.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import msgspec

from corrente.algo.base import Algorithm
from corrente.buffer.base import Buffer
from corrente.controller.plan import Plan
from corrente.controller.snapshot import Snapshot
from corrente.data.types import Prompt
from corrente.engine.base import Engine
from corrente.env.base import Env
from corrente.inflight.base import InflightPolicy
from corrente.learner.base import Learner
from corrente.observe.base import Sink
from corrente.prompts.base import Prompts
from corrente.score.base import Scorer
from corrente.staleness.base import StalenessPolicy
from corrente.sync.base import Sync


class Checkpoints(Protocol):
    """Contract: ``write`` is atomic; a crash at any point leaves the earlier ones intact. Raises CheckpointError."""

    async def write(self, snapshot: Snapshot, learner: Learner) -> Path: ...


class Parts(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Everything ``pipeline.run`` uses. ``checkpoints`` None: none is written."""

    plan: Plan
    prompts: Prompts
    engine: Engine
    env: Env
    scorer: Scorer
    buffer: Buffer
    staleness: StalenessPolicy
    algorithm: Algorithm
    learner: Learner
    sync: Sync
    inflight: InflightPolicy
    sink: Sink
    eval_prompts: tuple[Prompt, ...] = ()
    eval_env: Env | None = None
    """Plays held-out prompts, where their sampling differs; None: ``env`` does."""
    checkpoints: Checkpoints | None = None


class RunResult(msgspec.Struct, frozen=True, kw_only=True):
    """How a run ended. ``ended``: "steps" (all taken), "data" (no more prompts) or "stopped" (asked to).

    ``steps`` and ``version`` are those of the whole run, parts before a resume included; so are ``counts``, groups per outcome.
    ``checkpoint``: the one that was written at the end; None: none was.
    """

    ended: str
    steps: int
    version: int
    counts: Mapping[str, int]
    elapsed_s: float
    checkpoint: Path | None = None
