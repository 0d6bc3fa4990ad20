"""A taskset of verifiers that a tiny model of letters can learn: say one letter, and little else."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import verifiers.v1 as vf


class Wanted(vf.TaskData):
    letter: str


class Say(vf.Task[Wanted, vf.State, vf.TaskConfig]):
    @vf.reward(weight=2.0)
    async def letter(self, trace: Any) -> float:
        said = trace.last_reply
        return said.count(self.data.letter) / max(1, len(said))

    @vf.reward(weight=0.25)
    async def brief(self, trace: Any) -> dict[str, float]:
        return {"short": float(len(trace.last_reply) < 12)}

    @vf.metric
    async def length(self, trace: Any) -> float:
        return len(trace.last_reply)


class Boxed(Say):
    NEEDS_CONTAINER = True


class LettersConfig(vf.TasksetConfig):
    letter: str = "a"
    boxed: bool = False


class Letters(vf.Taskset[Say, LettersConfig]):
    def load(self) -> Iterable[Any]:
        task = Boxed if self.config.boxed else Say
        for first in "abcdefgh":
            data = Wanted(prompt=f"{first}de", system_prompt="fgh", letter=self.config.letter, name=first)
            yield task(data, self.config.task)
