"""Built-in reward functions. Each takes lists over a group's episodes, as every reward function does.

    exact_line          the completion's first line is the answer
    exact_match         all of the completion is the answer
    boxed_answer        the content of the last \\boxed{...} is the answer
    format_match        a pattern matches the completion
    think_format        one <think> ... </think>, at the beginning, then something else
    length_penalty      0 up to a length, falling to -1 at another
    repetition_penalty  minus the part of n-grams that were there before
    reasoning_gym       the score that a reasoning-gym task's dataset gives the answer (reasoning_gym.py)

A completion is text, or a list of messages, of which the assistant's last with any text counts. It is compared without the blanks
around it; a number given as the answer is compared as text. Parameters with defaults are set in the config, under the scorer's
``options``. They compare texts, not meanings: 1/2 and 0.5 differ.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from corrente.score.completion_text import Completion, completion_text
from corrente.score.reasoning_gym import reasoning_gym

THINK = r"\s*<think>(?:(?!</?think>).)*</think>(?!.*</?think>).*\S.*"


def exact_line(completions: Sequence[Completion], answer: Sequence[Any]) -> list[float]:
    """1 where the completion's first line is the answer and nothing else (spaces around it aside), 0 elsewhere."""
    pairs = zip(completions, answer, strict=True)
    return [
        float(completion_text(completion).split("\n", 1)[0].strip() == str(want).strip()) for completion, want in pairs
    ]


def exact_match(completions: Sequence[Completion], answer: Sequence[Any], *, ignore_case: bool = False) -> list[float]:
    """1 where the completion is the answer and nothing else (blanks around it aside), 0 elsewhere."""

    def plain(text: Any) -> str:
        return str(text).strip().casefold() if ignore_case else str(text).strip()

    return [
        float(plain(completion_text(completion)) == plain(want))
        for completion, want in zip(completions, answer, strict=True)
    ]


def boxed_answer(
    completions: Sequence[Completion], answer: Sequence[Any], *, missing: float | None = 0.0
) -> list[float | None]:
    """1 where the last ``\\boxed{...}`` holds the answer, blanks aside, 0 where it holds something else; ``missing`` where there
    is no box, or it is not closed."""
    return [
        missing
        if (found := last_boxed(completion_text(completion))) is None
        else float(_without_spaces(found) == _without_spaces(str(want)))
        for completion, want in zip(completions, answer, strict=True)
    ]


def last_boxed(text: str) -> str | None:
    """Content of the last ``\\boxed{...}`` of a text, inner braces included; None without one."""
    begin = text.rfind("\\boxed{")
    if begin < 0:
        return None
    depth = 0
    for at in range(begin + len("\\boxed"), len(text)):
        escaped = text[at - 1] == "\\"
        depth += (text[at] == "{" and not escaped) - (text[at] == "}" and not escaped)
        if not depth:
            return text[begin + len("\\boxed{") : at]
    return None


def format_match(completions: Sequence[Completion], *, pattern: str) -> list[float]:
    """1 where ``pattern``, a regular expression in which a dot is any character, matches the whole completion, 0 elsewhere."""
    compiled = re.compile(pattern, re.DOTALL)
    return [float(compiled.fullmatch(completion_text(completion)) is not None) for completion in completions]


def think_format(completions: Sequence[Completion]) -> list[float]:
    """1 where the completion begins with one closed <think> block and goes on after it, 0 elsewhere."""
    return format_match(completions, pattern=THINK)


def length_penalty(completion_ids: Sequence[Sequence[int]], *, free: int = 256, limit: int = 512) -> list[float]:
    """0 up to ``free`` tokens, then falling in a line to -1 at ``limit`` and beyond."""
    if not 0 <= free < limit:
        raise ValueError(f"free = {free} and limit = {limit}: free must be at least 0 and below limit")
    return [-min(1.0, max(0.0, (len(ids) - free) / (limit - free))) for ids in completion_ids]


def repetition_penalty(completion_ids: Sequence[Sequence[int]], *, n: int = 4) -> list[float]:
    """Minus the part of a completion's n-grams of tokens that it had before: 0 without any, towards -1 for a loop."""
    if n < 1:
        raise ValueError(f"n = {n}: it must be at least 1")
    return [-_repeated_share(list(ids), n) for ids in completion_ids]


def _repeated_share(ids: list[int], n: int) -> float:
    grams = [tuple(ids[at : at + n]) for at in range(len(ids) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def _without_spaces(text: str) -> str:
    return "".join(text.split())


BUILTINS: dict[str, Callable[..., object]] = {
    function.__name__: function
    for function in (
        exact_line,
        exact_match,
        boxed_answer,
        format_match,
        think_format,
        length_penalty,
        repetition_penalty,
        reasoning_gym,
    )
}
