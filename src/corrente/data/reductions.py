"""Numbers that carry their own reduction: weighted mean, sum, min, max, first or last of the recorded values.

A mean of means of unequal parts is wrong, and an averaged maximum hides what it was recorded for. So the reduction is part of the
record, and recording one name with two reductions is an error. An accumulator holds one number and one weight per name, however
much is recorded.
"""

from __future__ import annotations

from typing import Literal

Reduction = Literal["mean", "sum", "min", "max", "first", "last"]


class Accumulator:
    """Records values under names and reduces the values of each name to one number."""

    def __init__(self) -> None:
        self._reductions: dict[str, Reduction] = {}
        self._values: dict[str, float] = {}
        self._weights: dict[str, float] = {}

    def record(self, name: str, value: float, *, reduction: Reduction, weight: float = 1.0) -> None:
        """Add one value. ``weight`` counts for a mean only; a weight of 0 records nothing. ValueError if ``how`` changes."""
        if weight < 0:
            raise ValueError(f"{name}: a weight of {weight}; it must be at least 0")
        declared = self._reductions.setdefault(name, reduction)
        if declared != reduction:
            raise ValueError(f"{name} is a {declared}, and was recorded as a {reduction}")
        if reduction == "mean" and weight == 0:
            return
        if name not in self._values:
            self._values[name], self._weights[name] = value, weight
            return
        self._values[name] = self._combine(name, value, weight, reduction)

    def merge(self, other: Accumulator) -> None:
        """Add the records of another part of the same step. ValueError where the two disagree on a reduction."""
        for name, value in other._values.items():
            self.record(name, value, reduction=other._reductions[name], weight=other._weights[name])

    def reductions(self) -> dict[str, Reduction]:
        """The reduction of each name."""
        return dict(self._reductions)

    def value(self, name: str) -> float | None:
        """The reduced value of ``name``; None when nothing was recorded."""
        return self._values.get(name)

    def reduced_values(self) -> dict[str, float]:
        """The reduced values of all names."""
        return dict(self._values)

    def _combine(self, name: str, value: float, weight: float, reduction: Reduction) -> float:
        before = self._values[name]
        match reduction:
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
