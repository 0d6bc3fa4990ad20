"""Prompts that hold only a seed, for environments that make a task from it and describe the task themselves.

The n-th prompt has the number n in its column "seed" and in its id, so an environment is reset differently for each prompt and
equally for all members of a group. Held-out prompts have numbers that training never reaches, whatever its seed.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from corrente.config import Seeds
from corrente.data.types import Prompt
from corrente.prompts.procedural import ProceduralPrompts

Encode = Callable[[str], list[int]]

HELD_OUT = 1 << 40
"""The first number used for evaluation."""


class SeedPrompts(ProceduralPrompts):
    """Seeds without end. The run's seed shifts the numbers by 2^24, so that another run plays other tasks.

    Numbers wrap before the held-out ones, so runs whose seeds are equal modulo 2^16 play the same tasks.
    """

    def __init__(self, config: Seeds, encode: Encode, *, seed: int) -> None:
        def make(number: int) -> Prompt:
            return _make_prompt(f"0/{number}", ((seed << 24) + number) % HELD_OUT, config.text, encode)

        super().__init__(make, description="seeds without end")


def held_out_seeds(config: Seeds, encode: Encode, *, count: int) -> tuple[Prompt, ...]:
    """The first ``count`` held-out seeds, the same for every run."""
    return tuple(_make_prompt(f"eval/{row}", HELD_OUT + row, config.text, encode) for row in range(count))


def _make_prompt(prompt_id: str, number: int, text: str, encode: Encode) -> Prompt:
    tokens = np.array(encode(text) if text else [], np.int32)
    return Prompt(id=prompt_id, tokens=tokens, text=text, fields={"seed": number})
