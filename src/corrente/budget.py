"""How much may fail. One failed episode is data; one boundary that fails systematically ends the run with a clear error."""

from __future__ import annotations

from collections import deque

from corrente.errors import FailureBudgetError


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
