"""Prompts without end, the n-th made from its number alone: what every procedural source is.

The position is a number, an unfinished prompt is found again by its own, and nothing has to be kept to go on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from corrente.data.types import Prompt


class NumberedPrompts:
    """Implements Prompts. ``make`` gives the prompt of a number, whose id is "0/<number>"."""

    def __init__(self, make: Callable[[int], Prompt], *, description: str) -> None:
        self._make, self._description = make, description
        self._position = 0

    def next(self) -> Prompt | None:
        prompt = self._make(self._position)
        self._position += 1
        return prompt

    def find(self, ids: Sequence[str]) -> tuple[Prompt, ...]:
        return tuple(self._make(int(prompt_id.partition("/")[2])) for prompt_id in ids)

    def state(self) -> dict[str, Any]:
        return {"position": self._position}

    def restore(self, state: dict[str, Any]) -> None:
        self._position = int(state["position"])

    def describe(self) -> str:
        return self._description
