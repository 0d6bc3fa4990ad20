"""Parses the answers of reward functions. Every wrong answer becomes an error value, not an exception."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Set
from itertools import islice
from typing import Any

import msgspec

from corrente.data.types import LARGEST_REWARD


class ParsedScore(msgspec.Struct, frozen=True):
    """One value of an answer: a number, None where it does not apply, or an error."""

    score: float | None = None
    error: str = ""


def parse_answer_values(name: str, answer: Any, *, count: int) -> list[ParsedScore]:
    """Parse the answer of the function ``name`` into ``count`` scores."""
    values = _as_list(answer, most=count)
    if values is None:
        shape = f"answered with {type(answer).__name__}, a list of {count} numbers or None is needed"
        return [ParsedScore(error=f"{name}: {shape}")] * count
    if len(values) != count:
        cut_short = len(values) > count and not isinstance(answer, Collection)
        many = f"more than {count}" if cut_short else str(len(values))
        return [ParsedScore(error=f"{name}: answered with {many} values for {count} completions")] * count
    return [parse_score(name, value) for value in values]


def parse_score(name: str, value: Any) -> ParsedScore:
    """Parse one value: a finite number, small enough to compute with in float32, or None."""
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
    """The values of an answer, None for no list; of an iterator at most ``most`` + 1. A set has no order, and is no answer."""
    if isinstance(answer, str | bytes | Mapping | Set):
        return None
    try:
        return list(answer) if isinstance(answer, Collection) else list(islice(answer, most + 1))
    except TypeError:
        return None
