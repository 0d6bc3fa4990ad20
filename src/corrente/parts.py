"""What the pipeline is made of: one part per stage and axis, and the numbers of the plan. Built by ``assemble``, or by hand."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import msgspec

from corrente.algo.base import Algorithm
from corrente.buffer.base import Buffer
from corrente.config import Alarm, Eval, Filter, Limits
from corrente.engine.base import Engine
from corrente.env.base import Env
from corrente.inflight.base import InflightPolicy, Whole
from corrente.learner.base import Learner
from corrente.ledger import LedgerState
from corrente.observe.base import Sink
from corrente.prompts.base import Prompts
from corrente.score.base import Scorer
from corrente.staleness.base import StalenessPolicy
from corrente.sync.base import Sync
from corrente.transcript import Answer
from corrente.types import Group, Prompt


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers of a run. ``max_age``: versions a trained token may be old, asserted at every consumption; None: no bound.
    ``window``: how far past the oldest group consumption looks; 0: it takes in order of completion."""

    steps: int
    prompts_per_step: int
    group_size: int
    seed: int = 0
    publish_every: int = 1
    publish_retries: int = 3
    max_age: int | None = None
    window: int = 1
    checkpoint_every: int = 0
    samples_per_step: int = 0
    limits: Limits = Limits()
    filter: Filter = Filter()
    eval: Eval = Eval()
    alarm: Alarm = Alarm()


class Unfinished(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """An admitted prompt at the moment of a checkpoint: its id, and its group if generation and scoring were done. If not,
    ``answers``: per episode, what its requests were answered so far."""

    prompt_id: str
    group: Group | None = None
    answers: tuple[tuple[Answer, ...], ...] = ()


class Snapshot(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The control plane's half of a checkpoint. ``version`` is that of the learner's weights, live once the run resumes."""

    step: int
    version: int
    next_ticket: int
    ledger: LedgerState
    prompts: dict[str, Any]
    unfinished: tuple[Unfinished, ...] = ()
    elapsed_s: float = 0.0
    evaluated: int = -1
    """The newest version whose evaluation was reported; -1: none."""
    randomness: dict[str, Any] = {}
    """What ``randomness.state`` gave, for the code of users."""
    fruitless: tuple[int, int] = (0, 0)
    """Groups in a row that taught nothing: filtered, and trained without a row."""
    attempts: dict[str, tuple[list[bool], str]] = {}
    """By boundary, which of the last attempts failed, and the last error; see FailureBudget."""

    def admit_again(self, plan: Plan, one_version: Whole | None = None) -> list[Unfinished]:
        """What a run resumed from here admits before anything new, in order.

        A finished group is trained on after at most as many others as stand before it; an unfinished one may also be overtaken
        by ``plan.window`` - 1. A group, or an episode's record, that could be older than ``plan.max_age`` by then is generated
        anew. Under the settings it was admitted with there is no such group, by the theorem; a record may be one where W > 1.
        So is what would mix the versions of a request or of a group where ``one_version`` excludes that.
        """
        whole = [self._whole(unfinished, one_version) for unfinished in self.unfinished]
        return [self._fit(at, unfinished, plan) for at, unfinished in enumerate(whole)]

    def _whole(self, unfinished: Unfinished, one_version: Whole | None) -> Unfinished:
        """Without the answers that would go on, or be joined by others, under another version than the one they are of."""
        records = unfinished.answers
        if one_version == "group" and any(self._older(answer) for record in records for answer in record):
            records = ()
        if one_version == "request":
            records = tuple(
                tuple(answer.again() if self._older(answer) and not answer.finished else answer for answer in record)
                for record in records
            )
        return msgspec.structs.replace(unfinished, answers=records)

    def _older(self, answer: Answer) -> bool:
        return answer.oldest_version not in (None, self.version)

    def _fit(self, at: int, unfinished: Unfinished, plan: Plan) -> Unfinished:
        bound = plan.max_age
        if bound is None:
            return unfinished
        per_version = plan.prompts_per_step * plan.publish_every
        if unfinished.group is not None:
            age = self.version - unfinished.group.oldest_version + at // per_version
            return unfinished if age <= bound else msgspec.structs.replace(unfinished, group=None)
        overtaken = at + max(0, plan.window - 1)

        def keeps(record: tuple[Answer, ...]) -> bool:
            oldest = min((v for answer in record if (v := answer.oldest_version) is not None), default=self.version)
            as_if_new = oldest == self.version and at < per_version  # admitted at once, under the version that is live
            return as_if_new or self.version - oldest + overtaken // per_version <= bound

        if all(map(keeps, unfinished.answers)):
            return unfinished
        fit = tuple(record if keeps(record) else () for record in unfinished.answers)
        return msgspec.structs.replace(unfinished, answers=fit)


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
