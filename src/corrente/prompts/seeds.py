"""Nothing but numbers: for environments that make a task out of a seed, and say themselves what it is.

The n-th prompt has the number n in its column "seed" and in its id, so that an environment is reset in another way for each, and
in the same way for all members of its group. Held-out ones have numbers that training does not come to, whatever its seed.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from corrente.config import Seeds
from corrente.data.types import Prompt
from corrente.prompts.numbered import NumberedPrompts

Encode = Callable[[str], list[int]]

HELD_OUT = 1 << 40
"""The first number of evaluation."""


class SeedPrompts(NumberedPrompts):
    """The run's seed moves the numbers by 2^24, so that another run plays other tasks. They come round before the held-out ones:
    of seeds that are equal modulo 2^16 the tasks are."""

    def __init__(self, config: Seeds, encode: Encode, *, seed: int) -> None:
        def make(number: int) -> Prompt:
            return _prompt(f"0/{number}", ((seed << 24) + number) % HELD_OUT, config.text, encode)

        super().__init__(make, description="seeds without end")


def held_out_seeds(config: Seeds, encode: Encode, *, count: int) -> tuple[Prompt, ...]:
    """The first ``count`` seeds of evaluation, the same for every run."""
    return tuple(_prompt(f"eval/{row}", HELD_OUT + row, config.text, encode) for row in range(count))


def _prompt(prompt_id: str, number: int, text: str, encode: Encode) -> Prompt:
    tokens = np.array(encode(text) if text else [], np.int32)
    return Prompt(id=prompt_id, tokens=tokens, text=text, fields={"seed": number})
