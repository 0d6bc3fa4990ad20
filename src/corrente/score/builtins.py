"""Reward functions that are known by name. Each takes lists over a group's episodes, as every reward function does."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def exact_line(completions: Sequence[str], answer: Sequence[str]) -> list[float]:
    """1 where the completion's first line is the answer and nothing else (spaces around it aside), 0 elsewhere."""
    pairs = zip(completions, answer, strict=True)
    return [float(completion.split("\n", 1)[0].strip() == str(want).strip()) for completion, want in pairs]


BUILTINS: dict[str, Callable[..., object]] = {"exact_line": exact_line}
