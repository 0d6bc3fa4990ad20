"""The state of one run: its position, the account of its prompts, its failure budgets and its record of time.

The pipeline changes it; reporter, evaluator and checkpointer read it. ``snapshot`` is the control plane's half of a checkpoint,
and ``RunState(parts, snapshot)`` is the state of a run that goes on from one. It starts no task and calls no worker.
"""

from __future__ import annotations

from corrente.common import rng
from corrente.common.waiting import Condition
from corrente.controller.failure_budget import FailureBudget, UntrainableBudget
from corrente.controller.journal import Journal
from corrente.controller.ledger import Ledger
from corrente.controller.parts import Parts
from corrente.controller.snapshot import Snapshot, Unfinished


class RunState:
    """``snapshot``: the checkpoint that the run goes on from; ``parts.prompts`` is moved to its position in the data."""

    def __init__(self, parts: Parts, snapshot: Snapshot | None = None) -> None:
        plan = parts.plan
        self.plan = plan
        self._prompts = parts.prompts
        self.ledger = Ledger(snapshot.ledger if snapshot else None)
        self.journal = Journal(parts.sink, before_s=snapshot.elapsed_s if snapshot else 0.0)
        self.failures = FailureBudget(
            fraction=plan.limits.failure_fraction,
            window=plan.limits.failure_window,
            in_flight=(parts.buffer.occupancy().slots or 2 * plan.prompts_per_step) * plan.group_size,
            sink=parts.sink,
            before=snapshot.attempts if snapshot else None,
        )
        self.untrainable = UntrainableBudget(
            per_step=plan.prompts_per_step,
            patience=plan.filter.patience,
            sink=parts.sink,
            before=snapshot.untrainable if snapshot else (0, 0),
        )
        self.step = snapshot.step if snapshot else 0
        """Optimizer steps taken."""
        self.version = -1
        """The version live in the engine; -1: none yet."""
        self.learner_version = snapshot.version if snapshot else 0
        """The version the learner's next step starts from; at most one ahead of the live one, plus a step in progress."""
        self.live_step = self.step
        """The step whose weights are live."""
        self.steps_since_export = 0
        self.next_ticket = snapshot.next_ticket if snapshot else 0
        self.carried = snapshot.admit_again(plan, parts.inflight.one_version) if snapshot else list[Unfinished]()
        """Prompts that the earlier part of the run left unfinished and this one has not admitted yet, in order."""
        self.evaluated = snapshot.evaluated if snapshot else -1
        """The newest version whose evaluation was reported; -1: none."""
        self._reported_step, self._step_reported = self.step, Condition()
        if snapshot:
            parts.prompts.restore(snapshot.prompts)

    @property
    def at_version(self) -> bool:
        """True between two versions. Steps are counted from the last version: where data ended within one, it was a short one."""
        return self.steps_since_export % self.plan.publish_every == 0

    @property
    def caught_up(self) -> bool:
        """True when the learner's version is live."""
        return self.version == self.learner_version

    def mark_reported(self, step: int) -> None:
        """The numbers of ``step`` are in the sinks."""
        self._reported_step = step
        self._step_reported.notify_all()

    async def until_reported(self, step: int) -> None:
        """Return when the numbers of ``step`` are in the sinks."""
        await self._step_reported.wait_for(lambda: self._reported_step >= step)

    def snapshot(self) -> Snapshot:
        """The control plane as it stands now; live requests as they were last recorded."""
        outstanding = (
            Unfinished(prompt_id=admission.prompt.id, group=admission.group, answers=admission.answers())
            for admission in self.ledger.outstanding
        )
        return Snapshot(
            step=self.step,
            version=self.learner_version,
            next_ticket=self.next_ticket,
            ledger=self.ledger.state(),
            prompts=self._prompts.state(),
            unfinished=(*outstanding, *self.carried),
            elapsed_s=self.journal.elapsed_s,
            evaluated=self.evaluated,
            randomness=rng.rng_state(),
            untrainable=self.untrainable.state(),
            attempts=self.failures.state(),
        )
