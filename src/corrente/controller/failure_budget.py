"""How much may fail. One failed episode is data; one boundary that fails systematically ends the run with a clear error."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from corrente.controller.ledger import Ledger
from corrente.controller.parts import Parts
from corrente.controller.snapshot import Snapshot
from corrente.errors import FailureBudgetError, NothingToLearnError
from corrente.observe.base import Sink

ENGINE, ENVIRONMENT, SCORING = "the engine", "the environment", "scoring"
"""Boundaries at which an episode may fail."""


class FailureBudget:
    """Per boundary (engine, environment, scoring), the last ``window`` attempts; more than ``fraction`` of them failed, and there
    were ``window``, or at scoring all of the first ``window // 4`` failed: FailureBudgetError. ``sink`` is told of the first
    failure at each; None: nobody is.

    An attempt is recorded when it ends. One that engine or environment refuses ends at once, and makes room for others that
    may be refused as well, before any that goes well: more failures than there are places can come in a row although fewer
    attempts than allowed fail. So the window is at least twice ``in_flight``, the episodes that may be under way at once. What
    is scored was generated first, which takes its time: there a quarter of failures and nothing else is enough. ``before`` is
    what the earlier part of a resumed run attempted.
    """

    def __init__(
        self,
        *,
        fraction: float,
        window: int,
        in_flight: int = 0,
        sink: Sink | None = None,
        before: Mapping[str, tuple[list[bool], str]] | None = None,
    ) -> None:
        self._fraction = fraction
        self._window = max(window, 2 * in_flight)
        self._sink, self._told = sink, set[str]()
        self._recent = {boundary: deque(recent, self._window) for boundary, (recent, _) in (before or {}).items()}
        self._last = {boundary: last for boundary, (_, last) in (before or {}).items()}
        self._spent = False

    def attempt(self, boundary: str, error: str = "") -> None:
        """Record one attempt; ``error`` is empty when it went well."""
        recent = self._recent.setdefault(boundary, deque(maxlen=self._window))
        recent.append(bool(error))
        if error:
            self._last[boundary] = error
            self.tell(boundary, f"an episode failed at {boundary}, the first to do so: {error}")
        failed = sum(recent)
        full = len(recent) == self._window
        hopeless = boundary == SCORING and failed == len(recent) >= max(2, self._window // 4) and self._fraction < 1
        if error and ((full and failed > self._fraction * len(recent)) or hopeless):
            self._spent = True
            raise FailureBudgetError(
                f"{failed} of the last {len(recent)} attempts failed at {boundary}; the last: {error} "
                f"(allowed: limits.failure_fraction = {self._fraction} of {self._window}: limits.failure_window, or twice what "
                "may be under way)"
            )

    def state(self) -> dict[str, tuple[list[bool], str]]:
        """What a resumed run counts on from; nothing where it has ended the run already."""
        if self._spent:
            return {}
        return {boundary: (list(recent), self._last.get(boundary, "")) for boundary, recent in self._recent.items()}

    def close(self) -> None:
        """The data has ended: nothing more comes to fill a window, so what was attempted is what counts."""
        for boundary, recent in self._recent.items():
            failed = sum(recent)
            if failed > self._fraction * len(recent):
                self._spent = True
                raise FailureBudgetError(
                    f"the data ended, and {failed} of the last {len(recent)} attempts had failed at {boundary}; the last: "
                    f"{self._last[boundary]} (allowed: limits.failure_fraction = {self._fraction})"
                )

    def tell(self, subject: str, text: str) -> None:
        """Tell the sink, the first time something is to be said of ``subject``."""
        if self._sink is not None and subject not in self._told:
            self._told.add(subject)
            self._sink.log_event("warning", text.splitlines()[0][:400])


class Untrainable:
    """Groups in a row that teach nothing: NothingToLearnError after ``patience`` steps' worth; a warning the first time it is one
    step's worth, and whenever it is half of the patience."""

    def __init__(self, *, per_step: int, patience: int, sink: Sink, in_a_row: int = 0) -> None:
        """``in_a_row``: those that an earlier part of the run ended with."""
        self._per_step = per_step
        self._patience = patience
        self._sink = sink
        self.in_a_row = in_a_row
        self._warned = False

    def count(self, groups: int, reason: str) -> None:
        """``groups`` came by that teach nothing, and why; with no reason they do teach something."""
        if not reason:
            self.in_a_row = 0
            return
        before, self.in_a_row = self.in_a_row, self.in_a_row + groups
        said = f"{self.in_a_row} groups in a row teach nothing ({reason})"
        half = max(self._per_step, self._patience * self._per_step // 2)
        if before < self._per_step <= self.in_a_row and not self._warned:
            self._warned = True
            self._sink.log_event("warning", f"{said}: a step's worth")
        elif before < half <= self.in_a_row:
            self._sink.log_event("warning", f"{said}: half of what filter.patience allows")
        if self.in_a_row >= self._patience * self._per_step:
            raise NothingToLearnError(
                f"{said}: the task is solved, impossible, its reward is constant, or too few episodes of a prompt get through "
                f"(allowed: filter.patience = {self._patience} batches of {self._per_step})"
            )

    @property
    def carried(self) -> int:
        """What a resumed run counts on from: the groups in a row, or none where they have ended the run already."""
        return self.in_a_row if self.in_a_row < self._patience * self._per_step else 0


class UntrainableBudget:
    """Both places where groups turn out to teach nothing: ``filtered`` before the buffer, ``empty`` in a step without a row."""

    def __init__(self, *, per_step: int, patience: int, sink: Sink, before: tuple[int, int] = (0, 0)) -> None:
        self.filtered, self.empty = (
            Untrainable(per_step=per_step, patience=patience, sink=sink, in_a_row=count) for count in before
        )

    def state(self) -> tuple[int, int]:
        """What a resumed run counts on from."""
        return self.filtered.carried, self.empty.carried

    def close(self, budget: FailureBudget, ledger: Ledger) -> Exception | None:
        """What makes the end of the data no good end of a run: too much failed, or nothing was trained on."""
        try:
            budget.close()
        except FailureBudgetError as failure:
            return failure
        if ledger.count("trained") or not any(ledger.counts().values()):
            return None
        return NothingToLearnError(f"the data ended, and nothing of it was trained on ({ledger.told()})")


def budgets(parts: Parts, snapshot: Snapshot | None) -> tuple[FailureBudget, UntrainableBudget]:
    """Both accounts of a run, or of one that goes on from ``snapshot``."""
    plan = parts.plan
    attempts, before = (snapshot.attempts, snapshot.fruitless) if snapshot else ({}, (0, 0))
    budget = FailureBudget(
        fraction=plan.limits.failure_fraction,
        window=plan.limits.failure_window,
        in_flight=(parts.buffer.occupancy().slots or 2 * plan.prompts_per_step) * plan.group_size,
        sink=parts.sink,
        before=attempts,
    )
    per_step, patience = plan.prompts_per_step, plan.filter.patience
    return budget, UntrainableBudget(per_step=per_step, patience=patience, sink=parts.sink, before=before)
