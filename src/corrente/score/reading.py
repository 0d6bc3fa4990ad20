"""What a reward function answered, as marks: every way to answer wrongly is told apart by value, not by exception."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec


class Reading(msgspec.Struct, frozen=True):
    """One value of an answer: a number, None where it does not apply, or why it is neither."""

    score: float | None = None
    error: str = ""


def read(name: str, answer: Any, *, count: int) -> list[Reading]:
    """``count`` readings of the answer that ``name`` gave."""
    values = _as_list(answer)
    if values is None:
        shape = f"answered with {type(answer).__name__}, a list of {count} numbers or None is needed"
        return [Reading(error=f"{name}: {shape}")] * count
    if len(values) != count:
        return [Reading(error=f"{name}: answered with {len(values)} values for {count} completions")] * count
    return [number(name, value) for value in values]


def number(name: str, value: Any) -> Reading:
    """One value: a finite number or None."""
    if value is None:
        return Reading()
    try:
        found = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError):
        found = math.nan
    if not math.isfinite(found):
        return Reading(error=f"{name}: answered with {str(value)[:80]!r}, a finite number or None is needed")
    return Reading(score=found)


def _as_list(answer: Any) -> list[Any] | None:
    if isinstance(answer, str | bytes | Mapping):
        return None
    try:
        return list(answer)
    except TypeError:
        return None
