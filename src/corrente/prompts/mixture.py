"""Mix several sources of prompts: each prompt is drawn from one of them, by weight.

The n-th draw depends on the seed, on n and on which sources have ended, so the state is the position and those of the sources.
Weights move linearly from ``weight`` to ``weight_end`` over the prompts that the run's steps need: a curriculum. After those
(filtered groups are replaced by more prompts) they stay as they are. A resumed run keeps the ``length`` it began with, however
many steps it takes. When a source ends, the others share its weight in proportion to theirs.
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


class MixtureSource(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A source, its name in prompt ids, and its weight at the beginning and at the end of the run."""

    name: str
    prompts: Prompts
    weight: float = 1.0
    weight_end: float | None = None

    def weight_at(self, progress: float) -> float:
        """The weight when the fraction ``progress`` of the run is over."""
        end = self.weight if self.weight_end is None else self.weight_end
        return self.weight + (end - self.weight) * progress


class MixturePrompts:
    """Implements Prompts. ``length``: prompts over which the weights move. Ids are "<name>:<id of the source>"."""

    def __init__(self, sources: Sequence[MixtureSource], *, seed: int, length: int) -> None:
        self._sources = {part.name: part for part in sources}
        self._seed, self._length = seed, max(1, length)
        self._drawn = 0
        self._ended: list[str] = []

    def next_prompt(self) -> Prompt | None:
        while (part := self._draw_source()) is not None:
            prompt = part.prompts.next_prompt()
            if prompt is not None:
                self._drawn += 1
                return label_source(part.name, prompt)
            self._ended.append(part.name)
        return None

    def find_prompts(self, ids: Sequence[str]) -> tuple[Prompt, ...]:
        split = [name.partition(":") for name in ids]
        if unknown := [name for name, _, _ in split if name not in self._sources]:
            raise ConfigError(f"prompts.sources has no source {unknown[0]!r}, from which the checkpoint has prompts")
        return tuple(
            label_source(name, self._sources[name].prompts.find_prompts([inner])[0]) for name, _, inner in split
        )

    def state(self) -> dict[str, Any]:
        sources = {name: part.prompts.state() for name, part in self._sources.items()}
        return {"drawn": self._drawn, "length": self._length, "ended": list(self._ended), "sources": sources}

    def restore(self, state: dict[str, Any]) -> None:
        """Raises ConfigError when the sources are not those the position was taken in."""
        if set(state["sources"]) != set(self._sources):
            before, now = ", ".join(sorted(state["sources"])), ", ".join(sorted(self._sources))
            raise ConfigError(f"prompts.sources are {now}, but were {before} when the checkpoint was written")
        self._drawn, self._ended = int(state["drawn"]), [str(name) for name in state["ended"]]
        self._length = int(state.get("length", self._length))
        for name, part in self._sources.items():
            part.prompts.restore(state["sources"][name])

    def describe(self) -> str:
        def shares(part: MixtureSource) -> str:
            moves = part.weight_end is not None and part.weight_end != part.weight
            return f"{part.weight:g} to {part.weight_end:g}" if moves else f"{part.weight:g}"

        listed = (f"{part.name} (weight {shares(part)}): {part.prompts.describe()}" for part in self._sources.values())
        return f"{len(self._sources)} sources: " + "; ".join(listed)

    def _draw_source(self) -> MixtureSource | None:
        """The source of the next prompt; None when all have ended. Where all others weigh 0 now, the first of them."""
        progress = min(1.0, self._drawn / self._length)
        shares = [(part, part.weight_at(progress)) for part in self._sources.values() if part.name not in self._ended]
        total = sum(share for _, share in shares)
        if total <= 0:
            return shares[0][0] if shares else None
        point = random.Random(f"corrente/mixture/{self._seed}/{self._drawn}").random() * total
        for part, share in shares:
            point -= share
            if point < 0:
                return part
        return next(part for part, share in reversed(shares) if share > 0)


def label_source(name: str, prompt: Prompt) -> Prompt:
    """The prompt with the source's name before its id, and in the column "source" where it has no such column."""
    return msgspec.structs.replace(prompt, id=f"{name}:{prompt.id}", fields={COLUMN: name, **prompt.fields})
