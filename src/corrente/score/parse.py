"""What a reward function answered, as marks: every way to answer wrongly is told apart by value, not by exception."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Set
from itertools import islice
from typing import Any

import msgspec

from corrente.data.types import LARGEST_REWARD


class ParsedScore(msgspec.Struct, frozen=True):
    """One value of an answer: a number, None where it does not apply, or why it is neither."""

    score: float | None = None
    error: str = ""


def read(name: str, answer: Any, *, count: int) -> list[ParsedScore]:
    """``count`` readings of the answer that ``name`` gave."""
    values = _as_list(answer, most=count)
    if values is None:
        shape = f"answered with {type(answer).__name__}, a list of {count} numbers or None is needed"
        return [ParsedScore(error=f"{name}: {shape}")] * count
    if len(values) != count:
        cut_short = len(values) > count and not isinstance(answer, Collection)
        many = f"more than {count}" if cut_short else str(len(values))
        return [ParsedScore(error=f"{name}: answered with {many} values for {count} completions")] * count
    return [number(name, value) for value in values]


def number(name: str, value: Any) -> ParsedScore:
    """One value: a finite number, small enough for float32 to compute with, or None."""
    if value is None:
        return ParsedScore()
    try:
        found = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError):
        found = math.nan
    if not math.isfinite(found):
        return ParsedScore(error=f"{name}: answered with {str(value)[:80]!r}, a finite number or None is needed")
    if abs(found) > LARGEST_REWARD:
        return ParsedScore(error=f"{name}: answered with {found:g}, a reward is at most {LARGEST_REWARD:g} in size")
    return ParsedScore(score=found)


def _as_list(answer: Any, *, most: int) -> list[Any] | None:
    """Its values; of what does not say how many it has, one more than ``most`` at most. A set has no order, and is no answer."""
    if isinstance(answer, str | bytes | Mapping | Set):
        return None
    try:
        return list(answer) if isinstance(answer, Collection) else list(islice(answer, most + 1))
    except TypeError:
        return None
