"""Prompts without end, the n-th of which is made from n only: the base of every procedural source.

The position is a number, an unfinished prompt is made again from its own number, and there is no other state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from corrente.data.types import Prompt


class ProceduralPrompts:
    """Implements Prompts. ``make`` returns the prompt of a number; its id is "0/<number>"."""

    def __init__(self, make: Callable[[int], Prompt], *, description: str) -> None:
        self._make, self._description = make, description
        self._position = 0

    def next_prompt(self) -> Prompt | None:
        prompt = self._make(self._position)
        self._position += 1
        return prompt

    def find_prompts(self, ids: Sequence[str]) -> tuple[Prompt, ...]:
        return tuple(self._make(int(prompt_id.partition("/")[2])) for prompt_id in ids)

    def state(self) -> dict[str, Any]:
        return {"position": self._position}

    def restore(self, state: dict[str, Any]) -> None:
        self._position = int(state["position"])

    def describe(self) -> str:
        return self._description
