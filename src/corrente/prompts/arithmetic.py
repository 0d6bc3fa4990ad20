"""Sums of two numbers behind worked examples: a task with an exact answer, drawn without end from a seed.

The hash of a pair decides whether it is held out, not the seed; a + b and b + a go together, so that no held-out sum is ever
trained on in the other order. The worked examples are never held out. The position is the only state.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from functools import cache

import numpy as np

from corrente.config import Arithmetic
from corrente.data.types import Prompt
from corrente.errors import ConfigError
from corrente.prompts.procedural import ProceduralPrompts

Encode = Callable[[str], list[int]]
Pair = tuple[int, int]

EXAMPLES: dict[int, tuple[Pair, ...]] = {1: ((2, 3), (6, 1)), 2: ((12, 34), (61, 17))}
"""The first worked examples, per number of digits; the others are drawn."""
SALT = "held out 11"
"""Chosen so that the share of the 100 one-digit pairs comes near what is asked: 10, 19, 28, 52 for 0.1, 0.2, 0.3, 0.5."""
_MAX_DRAWS = 10_000


class ArithmeticPrompts(ProceduralPrompts):
    """Sums drawn without end; the n-th prompt depends on the seed and n only."""

    def __init__(self, config: Arithmetic, encode: Encode, *, seed: int) -> None:
        self._config, self._encode, self._seed = config, encode, seed
        self._shots = worked_examples(config)
        super().__init__(
            self._draw_sum,
            description=f"sums of two {config.digits}-digit numbers behind {config.shots} worked examples, "
            f"{config.held_out:.0%} of the pairs held out",
        )

    def _draw_sum(self, number: int) -> Prompt:
        draws = random.Random(f"corrente/arithmetic/{self._seed}/{number}")
        for _ in range(_MAX_DRAWS):
            pair = draw_pair(draws, digits=self._config.digits)
            if not is_held_out(pair, self._config):
                return _make_prompt(f"0/{number}", pair, self._shots, self._encode)
        raise ConfigError(f"prompts.held_out = {self._config.held_out} leaves no pair to train on: set it lower")


def held_out_prompts(config: Arithmetic, encode: Encode, *, count: int) -> tuple[Prompt, ...]:
    """The first ``count`` held-out sums in a fixed order, the same for every seed; fewer where there are fewer.

    ConfigError when ``held_out`` holds out no pair.
    """
    text = worked_examples(config)
    chosen: dict[Pair, None] = {}
    draws = random.Random(f"corrente/arithmetic/held out/{config.digits}")
    for _ in range(_MAX_DRAWS + 100 * count):
        if len(chosen) == count:
            break
        pair = draw_pair(draws, digits=config.digits)
        if is_held_out(pair, config):
            chosen[pair] = None
    if not chosen:
        raise ConfigError(f"prompts.held_out = {config.held_out} holds out no pair: set it higher")
    return tuple(_make_prompt(f"eval/{row}", pair, text, encode) for row, pair in enumerate(chosen))


def verify_arithmetic(config: Arithmetic) -> None:
    """Raise ConfigError when ``held_out`` leaves no pair to train on, or holds out none."""
    next_prompt = ArithmeticPrompts(config, lambda _: [], seed=0).next_prompt()
    assert next_prompt is not None
    held_out_prompts(config, lambda _: [], count=1)


def draw_pair(draws: random.Random, *, digits: int) -> Pair:
    """Draw two numbers of ``digits`` digits; a single digit may be 0."""
    low, high = (0, 9) if digits == 1 else (10 ** (digits - 1), 10**digits - 1)
    return draws.randint(low, high), draws.randint(low, high)


def is_held_out(pair: Pair, config: Arithmetic) -> bool:
    """True when the hash of the pair, in either order, falls below ``held_out``. Worked examples are never held out."""
    if pair in example_pairs(config) or pair[::-1] in example_pairs(config):
        return False
    low, high = sorted(pair)
    digest = hashlib.blake2b(f"{SALT}: {low} + {high}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < config.held_out * 2**64


def worked_examples(config: Arithmetic) -> str:
    """The worked examples as text, one per line."""
    return "".join(f"{a} + {b} = {a + b}\n" for a, b in example_pairs(config))


@cache
def example_pairs(config: Arithmetic) -> tuple[Pair, ...]:
    """The pairs of the worked examples: the fixed ones first, then drawn ones, the same for every seed."""
    fixed = EXAMPLES.get(config.digits, ())[: config.shots]
    draws = random.Random(f"corrente/arithmetic/examples/{config.digits}")
    return (*fixed, *(draw_pair(draws, digits=config.digits) for _ in range(config.shots - len(fixed))))


def _make_prompt(prompt_id: str, pair: Pair, worked: str, encode: Encode) -> Prompt:
    a, b = pair
    text = f"{worked}{a} + {b} ="
    tokens = np.array(encode(text), np.int32)
    return Prompt(id=prompt_id, tokens=tokens, text=text, fields={"answer": str(a + b)})
