"""Failure budgets. One failed episode is data; a boundary that fails systematically ends the run with a clear error.

FailureBudget       attempts that failed, per boundary: FailureBudgetError
UntrainableBudget   groups in a row that teach nothing: NothingToLearnError
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from corrente.controller.ledger import Ledger
from corrente.errors import FailureBudgetError, NothingToLearnError
from corrente.observe.base import Sink

ENGINE, ENVIRONMENT, SCORING = "the engine", "the environment", "scoring"
"""Boundaries at which an episode may fail."""


class FailureBudget:
    """Counts, per boundary, the failures among the last ``window`` attempts.

    FailureBudgetError is raised when more than ``fraction`` of a full window failed, and at scoring also when all of the first
    ``window // 4`` failed. ``sink`` is told of the first failure at each boundary; None: nobody is.

    An attempt is recorded when it ends. One that engine or environment refuses ends at once, and makes room for others that
    may be refused as well, before any that goes well: more failures than there are places can come in a row although fewer
    attempts than allowed fail. So the window is at least twice ``in_flight``, the episodes that may be under way at once. A group
    that is scored was generated first, which takes its time: there a quarter of failures and nothing else is enough. ``before``:
    the ``state`` of the earlier part of a resumed run.
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
        self._sink, self._warned = sink, set[str]()
        self._recent = {boundary: deque(recent, self._window) for boundary, (recent, _) in (before or {}).items()}
        self._last = {boundary: last for boundary, (_, last) in (before or {}).items()}
        self._spent = False

    def attempt(self, boundary: str, error: str = "") -> None:
        """Record one attempt; ``error`` is empty when it went well. Raises FailureBudgetError."""
        recent = self._recent.setdefault(boundary, deque(maxlen=self._window))
        recent.append(bool(error))
        if not error:
            return
        self._last[boundary] = error
        self.warn_once(boundary, f"an episode failed at {boundary}, the first to do so: {error}")
        failed = sum(recent)
        too_many = len(recent) == self._window and failed > self._fraction * len(recent)
        scoring_always_fails = (
            boundary == SCORING and failed == len(recent) >= max(2, self._window // 4) and self._fraction < 1
        )
        if too_many or scoring_always_fails:
            self._spent = True
            raise FailureBudgetError(
                f"{failed} of the last {len(recent)} attempts failed at {boundary}; the last: {error} "
                f"(allowed: limits.failure_fraction = {self._fraction} of {self._window}: limits.failure_window, or twice what "
                "may be under way)"
            )

    def state(self) -> dict[str, tuple[list[bool], str]]:
        """The attempts a resumed run counts on from; nothing where they have ended the run already."""
        if self._spent:
            return {}
        return {boundary: (list(recent), self._last.get(boundary, "")) for boundary, recent in self._recent.items()}

    def check_at_end(self) -> None:
        """Judge windows that are not full, for the data has ended and nothing more fills them. Raises FailureBudgetError."""
        for boundary, recent in self._recent.items():
            failed = sum(recent)
            if failed > self._fraction * len(recent):
                self._spent = True
                raise FailureBudgetError(
                    f"the data ended, and {failed} of the last {len(recent)} attempts had failed at {boundary}; the last: "
                    f"{self._last[boundary]} (allowed: limits.failure_fraction = {self._fraction})"
                )

    def warn_once(self, subject: str, text: str) -> None:
        """Send a warning to the sink; later warnings about the same ``subject`` are left out."""
        if self._sink is not None and subject not in self._warned:
            self._warned.add(subject)
            self._sink.log_event("warning", text.splitlines()[0][:400])


class UntrainableStreak:
    """Counts groups in a row that teach nothing.

    NothingToLearnError after ``patience`` steps' worth of them; a warning the first time it is one step's worth, and whenever it
    is half of the patience.
    """

    def __init__(self, *, per_step: int, patience: int, sink: Sink, in_a_row: int = 0) -> None:
        """``in_a_row``: the number that an earlier part of the run ended with."""
        self._per_step = per_step
        self._patience = patience
        self._sink = sink
        self.in_a_row = in_a_row
        self._warned = False

    def count(self, groups: int, reason: str) -> None:
        """Count ``groups`` that teach nothing, for ``reason``; an empty reason says that they do, and ends the streak."""
        if not reason:
            self.in_a_row = 0
            return
        before, self.in_a_row = self.in_a_row, self.in_a_row + groups
        text = f"{self.in_a_row} groups in a row teach nothing ({reason})"
        half = max(self._per_step, self._patience * self._per_step // 2)
        if before < self._per_step <= self.in_a_row and not self._warned:
            self._warned = True
            self._sink.log_event("warning", f"{text}: a step's worth")
        elif before < half <= self.in_a_row:
            self._sink.log_event("warning", f"{text}: half of what filter.patience allows")
        if self._spent:
            raise NothingToLearnError(
                f"{text}: the task is solved, impossible, its reward is constant, or too few episodes of a prompt get through "
                f"(allowed: filter.patience = {self._patience} batches of {self._per_step})"
            )

    def state(self) -> int:
        """The number a resumed run counts on from; none where it has ended the run already."""
        return 0 if self._spent else self.in_a_row

    @property
    def _spent(self) -> bool:
        return self.in_a_row >= self._patience * self._per_step


class UntrainableBudget:
    """Groups turn out to teach nothing in two places: ``filtered`` before the buffer, ``empty`` in a step without a row."""

    def __init__(self, *, per_step: int, patience: int, sink: Sink, before: tuple[int, int] = (0, 0)) -> None:
        """``before``: the ``state`` of the earlier part of a resumed run."""
        self.filtered, self.empty = (
            UntrainableStreak(per_step=per_step, patience=patience, sink=sink, in_a_row=count) for count in before
        )

    def state(self) -> tuple[int, int]:
        """The numbers a resumed run counts on from."""
        return self.filtered.state(), self.empty.state()


def failure_at_end_of_data(failures: FailureBudget, ledger: Ledger) -> Exception | None:
    """The error that the end of the data amounts to: too much failed, or nothing was trained on. None: the run ended well."""
    try:
        failures.check_at_end()
    except FailureBudgetError as failure:
        return failure
    if ledger.count("trained") or not any(ledger.counts().values()):
        return None
    return NothingToLearnError(f"the data ended, and nothing of it was trained on ({ledger.describe_reasons()})")
