"""Several sources of prompts as one: each prompt is drawn from one of them, by weight.

The n-th draw depends on the seed, n and which sources have ended, so position and the sources' own positions are all the state.
Weights move evenly from ``weight`` to ``weight_end`` over the prompts that the run's steps need: a curriculum. Past those (what
is filtered is replaced) they stay, and a resumed run keeps to the ``length`` it began with, however many steps it takes. A source
that ends leaves its share to the others, in proportion.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import msgspec

from corrente.data.types import Prompt
from corrente.errors import ConfigError
from corrente.prompts.base import Prompts

COLUMN = "source"


class Part(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A source, its name in ids, and the weight of its share at the beginning and at the end."""

    name: str
    prompts: Prompts
    weight: float = 1.0
    weight_end: float | None = None

    def share(self, progress: float) -> float:
        """Weight when that part of the run is over."""
        end = self.weight if self.weight_end is None else self.weight_end
        return self.weight + (end - self.weight) * progress


class MixturePrompts:
    """Implements Prompts. ``length``: prompts over which the weights move. Ids are "<name>:<id of the source>"."""

    def __init__(self, parts: Sequence[Part], *, seed: int, length: int) -> None:
        self._parts = {part.name: part for part in parts}
        self._seed, self._length = seed, max(1, length)
        self._drawn = 0
        self._ended: list[str] = []

    def next(self) -> Prompt | None:
        while (part := self._draw()) is not None:
            prompt = part.prompts.next()
            if prompt is not None:
                self._drawn += 1
                return labelled(part.name, prompt)
            self._ended.append(part.name)
        return None

    def find(self, ids: Sequence[str]) -> tuple[Prompt, ...]:
        split = [name.partition(":") for name in ids]
        if unknown := [name for name, _, _ in split if name not in self._parts]:
            raise ConfigError(f"prompts.sources has no source {unknown[0]!r}, from which the checkpoint has prompts")
        return tuple(labelled(name, self._parts[name].prompts.find([inner])[0]) for name, _, inner in split)

    def state(self) -> dict[str, Any]:
        sources = {name: part.prompts.state() for name, part in self._parts.items()}
        return {"drawn": self._drawn, "length": self._length, "ended": list(self._ended), "sources": sources}

    def restore(self, state: dict[str, Any]) -> None:
        """Raises ConfigError when the sources are not those the position was taken in."""
        if set(state["sources"]) != set(self._parts):
            before, now = ", ".join(sorted(state["sources"])), ", ".join(sorted(self._parts))
            raise ConfigError(f"prompts.sources are {now}, but were {before} when the checkpoint was written")
        self._drawn, self._ended = int(state["drawn"]), [str(name) for name in state["ended"]]
        self._length = int(state.get("length", self._length))
        for name, part in self._parts.items():
            part.prompts.restore(state["sources"][name])

    def describe(self) -> str:
        def shares(part: Part) -> str:
            moves = part.weight_end is not None and part.weight_end != part.weight
            return f"{part.weight:g} to {part.weight_end:g}" if moves else f"{part.weight:g}"

        listed = (f"{part.name} (weight {shares(part)}): {part.prompts.describe()}" for part in self._parts.values())
        return f"{len(self._parts)} sources: " + "; ".join(listed)

    def _draw(self) -> Part | None:
        """The source of the next prompt, any that is left where those weigh nothing now; None when all have ended."""
        progress = min(1.0, self._drawn / self._length)
        shares = [(part, part.share(progress)) for part in self._parts.values() if part.name not in self._ended]
        total = sum(share for _, share in shares)
        if total <= 0:
            return shares[0][0] if shares else None
        point = random.Random(f"corrente/mixture/{self._seed}/{self._drawn}").random() * total
        for part, share in shares:
            point -= share
            if point < 0:
                return part
        return next(part for part, share in reversed(shares) if share > 0)


def labelled(name: str, prompt: Prompt) -> Prompt:
    """The prompt under an id of the mixture, with its source as a column where it has none of that name."""
    return msgspec.structs.replace(prompt, id=f"{name}:{prompt.id}", fields={COLUMN: name, **prompt.fields})
