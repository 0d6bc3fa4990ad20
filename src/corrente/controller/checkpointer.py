"""Writes checkpoints: the run's state, with the tokens that live requests have so far, and the learner's weights."""

from __future__ import annotations

from pathlib import Path

import anyio

from corrente.controller.parts import Parts
from corrente.controller.run_state import RunState

PARTIALS_S = 5.0
"""Seconds a checkpoint waits for the engine to say what live requests have so far; it is then written without."""
CHECKPOINT_ATTR = "checkpoint"
"""Attribute of the span of a checkpoint that was written: the name of its folder."""


class Checkpointer:
    """Writes checkpoints between two steps, while generation goes on. Does nothing where ``parts.checkpoints`` is None."""

    def __init__(self, parts: Parts, state: RunState) -> None:
        self._engine, self._learner, self._checkpoints = parts.engine, parts.learner, parts.checkpoints
        self._state = state

    async def record_partials(self) -> None:
        """Record the tokens that live requests have so far: before a checkpoint is written, or before they are cancelled.

        Bounded by PARTIALS_S. A failure becomes a warning, and costs those tokens alone.
        """
        entries = [e for admission in self._state.ledger.outstanding for p in admission.partials for e in p.live()]
        if self._checkpoints is None or not entries:
            return
        journal = self._state.journal
        live = {entry.id: (entry, entry.written) for entry in entries}
        trouble = f"no answer within {PARTIALS_S} s"
        with anyio.move_on_after(PARTIALS_S), journal.waits.register_wait("learn", "what live requests have so far"):
            try:
                partials = await self._engine.partial_completions(tuple(live))
            except Exception as error:
                trouble = f"{type(error).__name__}: {error}"
            else:
                for name, partial in partials.items():
                    entry, written = live[name]
                    entry.record_partial(partial, written=written)
                return
        journal.sink.log_event(
            "warning", f"the checkpoint is written without what {len(live)} live requests have so far: {trouble}"
        )

    async def write(self) -> Path | None:
        """Write a checkpoint of the moment of the call and return its path; None where none is written.

        Raises CheckpointError. It appears only once the numbers of its step are in the sinks: a run that goes on from it must not
        miss them.
        """
        if self._checkpoints is None:
            return None
        snapshot, journal = self._state.snapshot(), self._state.journal
        with journal.waits.register_wait("learn", "the report of the step"):
            await self._state.until_reported(snapshot.step)
        start_s = journal.elapsed_s
        with journal.waits.register_wait("learn", "the checkpoint"):
            path = await self._checkpoints.write(snapshot, self._learner)
        journal.span("learn", f"checkpoint {snapshot.step}", start_s, **{CHECKPOINT_ATTR: path.name})
        journal.moved()
        return path
