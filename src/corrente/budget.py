"""How much may fail. One failed episode is data; one boundary that fails systematically ends the run with a clear error."""

from __future__ import annotations

from collections import deque

from corrente.errors import FailureBudgetError, NothingToLearnError
from corrente.observe.base import Sink


class FailureBudget:
    """Per boundary (the engine, the environment, a reward function), the last ``window`` attempts; more than ``fraction`` of
    them failed, and at least ``window`` were made or all of the first ``window // 4`` failed: FailureBudgetError."""

    def __init__(self, *, fraction: float, window: int) -> None:
        self._fraction = fraction
        self._window = window
        self._recent: dict[str, deque[bool]] = {}

    def attempt(self, boundary: str, error: str = "") -> None:
        """Record one attempt; ``error`` is empty when it went well."""
        recent = self._recent.setdefault(boundary, deque(maxlen=self._window))
        recent.append(bool(error))
        failed = sum(recent)
        full = len(recent) == self._window
        hopeless = failed == len(recent) >= max(2, self._window // 4) and self._fraction < 1
        if error and ((full and failed > self._fraction * len(recent)) or hopeless):
            raise FailureBudgetError(
                f"{failed} of the last {len(recent)} attempts failed at {boundary}; the last: {error} "
                f"(allowed: limits.failure_fraction = {self._fraction} of limits.failure_window = {self._window})"
            )


class Untrainable:
    """Groups in a row that teach nothing: NothingToLearnError after ``patience`` steps' worth; a warning the first time it is one
    step's worth, and whenever it is half of the patience."""

    def __init__(self, *, per_step: int, patience: int, sink: Sink) -> None:
        self._per_step = per_step
        self._patience = patience
        self._sink = sink
        self._in_a_row = 0
        self._warned = False

    def reset(self) -> None:
        """A group that teaches something came by."""
        self._in_a_row = 0

    def count(self, groups: int, reason: str) -> None:
        before, self._in_a_row = self._in_a_row, self._in_a_row + groups
        said = f"{self._in_a_row} groups in a row teach nothing ({reason})"
        half = max(self._per_step, self._patience * self._per_step // 2)
        if before < self._per_step <= self._in_a_row and not self._warned:
            self._warned = True
            self._sink.event("warning", f"{said}: a step's worth")
        elif before < half <= self._in_a_row:
            self._sink.event("warning", f"{said}: half of what filter.patience allows")
        if self._in_a_row >= self._patience * self._per_step:
            raise NothingToLearnError(
                f"{said}: the task is solved, impossible, or its reward is constant "
                f"(allowed: filter.patience = {self._patience} batches of {self._per_step})"
            )
