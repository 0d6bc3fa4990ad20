"""A tool, and environments, that a tiny model of letters can learn to use."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders

from corrente.env.environment import Observation

TEMPLATE = (
    "{% if tools %}h{% endif %}{% for m in messages %}{{ m.content }}"
    "{% if m.role == 'assistant' %}</s>{% else %}\n{% endif %}{% endfor %}"
)
"""In letters the tiny tokenizer has; shows that there are tools by an h."""
FORGETFUL = TEMPLATE.replace("</s>", "")
"""Leaves out where a turn of the policy ended: what was sampled is never what is shown of it later."""

CALLS = "(?P<name>[ab])(?P<arguments>)"
"""Every a and every b is a call."""


def with_true_text(model: Path) -> Path:
    """Let the tokenizer of a tiny model say what tokens stand for, with no blanks between them."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(model / "tokenizer.json"))
    return model


def a() -> str:
    """Says g."""
    return "g"


async def b() -> str:
    """Fails."""
    raise ValueError("no")


def called(completions: list[list[dict[str, Any]]], **columns: Any) -> list[float]:
    """How many of the first four calls a tool answered well, less what failed."""
    return [
        sum(1.0 if m["content"] == "g" else -0.5 for m in said if m["role"] == "tool") / 4.0 for said in completions
    ]


class Echo:
    """Of the Environment protocol: pays for every c in each of two messages."""

    async def reset(self, task: Mapping[str, Any], *, seed: int) -> Observation:
        self.heard = 0
        return Observation(messages=({"role": "user", "content": "de"},))

    async def step(self, message: Mapping[str, Any]) -> Observation:
        self.heard += 1
        text = str(message["content"])
        again = ({"role": "user", "content": "fe"},)
        return Observation(messages=again, reward=text.count("c") / max(1, len(text)), done=self.heard == 2)

    async def close(self) -> None: ...


class Bell:
    """Of TRL's shape: pays for every ring."""

    closed = 0

    def __init__(self) -> None:
        self.rings = 0

    def reset(self, **columns: Any) -> str:
        self.rings = 0
        return "ff"

    def a(self) -> str:
        """Rings."""
        self.rings += 1
        return "g"

    def get_reward(self) -> float:
        return min(self.rings, 4) / 4.0

    def close(self) -> None:
        Bell.closed += 1


def rung(environments: list[Bell], **columns: Any) -> list[float]:
    """What the live environment of each episode says."""
    return [0.1 * bell.rings for bell in environments]
