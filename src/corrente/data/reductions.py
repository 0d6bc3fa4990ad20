"""Numbers that say how they are to be combined: mean (weighted), sum, min, max, first or last of what was recorded.

A mean of means of unequal parts is wrong, and a maximum that is averaged hides what it was recorded for; so the reduction is part
of the record, and recording one name in two ways is an error. Holds one number (and a weight) per name, whatever is recorded.
"""

from __future__ import annotations

from typing import Literal

Reduction = Literal["mean", "sum", "min", "max", "first", "last"]


class Accumulator:
    """Records values under names and reduces each to one number."""

    def __init__(self) -> None:
        self._reductions: dict[str, Reduction] = {}
        self._values: dict[str, float] = {}
        self._weights: dict[str, float] = {}

    def record(self, name: str, value: float, *, how: Reduction, weight: float = 1.0) -> None:
        """Add one value. ``weight`` counts for a mean only; a weight of 0 records nothing. ValueError if ``how`` changes."""
        if weight < 0:
            raise ValueError(f"{name}: a weight of {weight}; it must be at least 0")
        declared = self._reductions.setdefault(name, how)
        if declared != how:
            raise ValueError(f"{name} is a {declared}, and was recorded as a {how}")
        if how == "mean" and weight == 0:
            return
        if name not in self._values:
            self._values[name], self._weights[name] = value, weight
            return
        self._values[name] = self._combine(name, value, weight, how)

    def merge(self, other: Accumulator) -> None:
        """Add what another recorded, of the same step elsewhere. ValueError where the two disagree on a reduction."""
        for name, value in other._values.items():
            self.record(name, value, how=other._reductions[name], weight=other._weights[name])

    def reductions(self) -> dict[str, Reduction]:
        """How each name was declared."""
        return dict(self._reductions)

    def value(self, name: str) -> float | None:
        """The reduced value; None when nothing was recorded."""
        return self._values.get(name)

    def reduced(self) -> dict[str, float]:
        """All of them."""
        return dict(self._values)

    def _combine(self, name: str, value: float, weight: float, how: Reduction) -> float:
        before = self._values[name]
        match how:
            case "mean":
                total = self._weights[name] + weight
                self._weights[name] = total
                return before + (value - before) * (weight / total)
            case "sum":
                return before + value
            case "min":
                return min(before, value)
            case "max":
                return max(before, value)
            case "first":
                return before
            case "last":
                return value
