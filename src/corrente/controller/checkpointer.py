"""The control plane's half of a checkpoint: what is outstanding, with what was written of it so far."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import anyio

from corrente.common import rng
from corrente.controller.evaluator import Evaluator
from corrente.controller.failure_budget import FailureBudget, UntrainableBudget
from corrente.controller.journal import Journal
from corrente.controller.ledger import Ledger
from corrente.controller.parts import Parts
from corrente.controller.reporter import Reporter
from corrente.controller.snapshot import Snapshot, Unfinished

LOOK_S = 5.0
"""How long a checkpoint waits for what the engine has of live requests; without an answer it is written without."""


class Checkpointer:
    """Writes a run down, between two steps, while generation goes on. Does nothing where nothing is to be written."""

    def __init__(
        self,
        parts: Parts,
        ledger: Ledger,
        journal: Journal,
        evaluator: Evaluator,
        reporter: Reporter,
        fruitless: UntrainableBudget,
        budget: FailureBudget,
    ) -> None:
        self._parts = parts
        self._evaluator, self._reporter = evaluator, reporter
        self._fruitless, self._budget = fruitless, budget
        self._ledger = ledger
        self._journal = journal

    async def look(self) -> None:
        """Have on record what the engine has of live requests: before a checkpoint is written, or before they are cancelled.
        Bounded, and a failure is told and costs no more than that."""
        entries = [e for a in self._ledger.outstanding for t in a.transcripts for e in t.live()]
        if self._parts.checkpoints is None or not entries:
            return
        live = {entry.id: (entry, entry.written) for entry in entries}
        trouble = f"no answer within {LOOK_S} s"
        with anyio.move_on_after(LOOK_S), self._journal.waits.register_wait("learn", "what live requests have so far"):
            try:
                partials = await self._parts.engine.partial_completions(tuple(live))
            except Exception as error:
                trouble = f"{type(error).__name__}: {error}"
            else:
                for name, partial in partials.items():
                    entry, written = live[name]
                    entry.look(partial, written=written)
                return
        self._journal.sink.log_event(
            "warning", f"the checkpoint is written without what {len(live)} live requests have so far: {trouble}"
        )

    async def write(self, *, step: int, version: int, next_ticket: int, carried: Sequence[Unfinished]) -> Path | None:
        """A checkpoint of the moment of the call, live requests as they were last looked at. ``carried``: what an earlier
        part of the run left and this one has not admitted yet."""
        if self._parts.checkpoints is None:
            return None
        outstanding = [
            Unfinished(prompt_id=a.prompt.id, group=a.group, answers=a.answers()) for a in self._ledger.outstanding
        ]
        snapshot = Snapshot(
            step=step,
            version=version,
            next_ticket=next_ticket,
            ledger=self._ledger.state(),
            prompts=self._parts.prompts.state(),
            unfinished=(*outstanding, *carried),
            elapsed_s=self._journal.elapsed_s,
            evaluated=self._evaluator.done,
            randomness=rng.rng_state(),
            fruitless=self._fruitless.state(),
            attempts=self._budget.state(),
        )
        with self._journal.waits.register_wait("learn", "the report of the step"):
            await self._reporter.reported(step)
        start_s = self._journal.elapsed_s
        with self._journal.waits.register_wait("learn", "the checkpoint"):
            path = await self._parts.checkpoints.write(snapshot, self._parts.learner)
        self._journal.span("learn", f"checkpoint {step}", start_s)
        self._journal.moved()
        return path
