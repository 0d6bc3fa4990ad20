"""What the pipeline is made of: one part per stage and axis, and the numbers of the plan. Built by ``assemble``, or by hand."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import msgspec

from corrente.algo.base import Algorithm
from corrente.buffer.base import Buffer
from corrente.config import Eval, Filter, Limits
from corrente.engine.base import Engine
from corrente.env.base import Env
from corrente.inflight.base import InflightPolicy
from corrente.learner.base import Learner
from corrente.ledger import LedgerState
from corrente.observe.base import Sink
from corrente.prompts.base import Prompts
from corrente.score.base import Scorer
from corrente.staleness.base import StalenessPolicy
from corrente.sync.base import Sync
from corrente.types import Group, Prompt


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers of a run. ``max_age``: versions a trained token may be old, asserted at every consumption; None: no bound."""

    steps: int
    prompts_per_step: int
    group_size: int
    seed: int = 0
    publish_every: int = 1
    publish_retries: int = 3
    max_age: int | None = None
    checkpoint_every: int = 0
    samples_per_step: int = 0
    limits: Limits = Limits()
    filter: Filter = Filter()
    eval: Eval = Eval()


class Unfinished(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """An admitted prompt at the moment of a checkpoint: its id, and its group if generation and scoring were done."""

    prompt_id: str
    group: Group | None = None


class Snapshot(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The control plane's half of a checkpoint. ``version`` is that of the learner's weights, live once the run resumes."""

    step: int
    version: int
    next_ticket: int
    ledger: LedgerState
    prompts: dict[str, Any]
    unfinished: tuple[Unfinished, ...] = ()
    elapsed_s: float = 0.0

    def admit_again(self, plan: Plan) -> list[Unfinished]:
        """What a run resumed from here admits before anything new, in order.

        A finished group is trained on after at most as many others as stand before it. One that could be older than
        ``plan.max_age`` by then is generated anew; under the settings it was admitted with there is none, by the theorem.
        """
        per_version = plan.prompts_per_step * plan.publish_every

        def kept(at: int, unfinished: Unfinished) -> bool:
            if unfinished.group is None or plan.max_age is None:
                return True
            return self.version - unfinished.group.oldest_version + at // per_version <= plan.max_age

        every = enumerate(self.unfinished)
        return [u if kept(at, u) else msgspec.structs.replace(u, group=None) for at, u in every]


class Checkpoints(Protocol):
    """Contract: ``write`` is atomic; a crash at any point leaves the earlier ones intact. Raises CheckpointError."""

    async def write(self, snapshot: Snapshot, learner: Learner) -> Path: ...


class Parts(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Everything ``pipeline.run`` uses. ``checkpoints`` None: nothing is written."""

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
    """How held-out prompts are played, where their sampling differs; None: like the others."""
    checkpoints: Checkpoints | None = None


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How a run ended: ``ended`` is "steps" (all taken), "data" (no more prompts) or "stopped" (asked to)."""

    ended: str
    steps: int
    version: int
    counts: Mapping[str, int]
    elapsed_s: float
    checkpoint: Path | None = None
