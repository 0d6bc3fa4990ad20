"""Scores answers to tasks of reasoning-gym with the task's own dataset: many tasks have more than one right answer.

The task is made again from the columns that ``prompts.kind = "reasoning_gym"`` gives, so nothing but plain data has to cross
processes. Making datasets imports the package, which takes seconds; the first call pays for it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import msgspec

from corrente.errors import ConfigError, RewardError
from corrente.score.completion_text import Completion, completion_text


def reasoning_gym(
    completions: Sequence[Completion],
    task: Sequence[str],
    task_options: Sequence[Mapping[str, Any]],
    task_seed: Sequence[int],
    task_index: Sequence[int],
    task_size: Sequence[int],
    answer: Sequence[str],
    *,
    tag: str = "answer",
) -> list[float]:
    """The dataset's score of the answer, between 0 and 1. The answer is the content of the last ``<tag>``; without one, the first
    line. An empty ``tag``: all of the completion. RewardError where the task made again is not the one that was played."""
    keys = zip(task, map(_options_key, task_options), task_seed, task_size, task_index, strict=True)
    return [
        _score_answer(completion_text(c), key, want, tag)
        for c, key, want in zip(completions, keys, answer, strict=True)
    ]


def extract_answer(text: str, *, tag: str) -> str:
    """Extract the answer from a completion."""
    if not tag:
        return text.strip()
    found = re.findall(rf"<{re.escape(tag)}>(.*?)</{re.escape(tag)}>", text, re.DOTALL)
    return (found[-1] if found else text.strip().split("\n", 1)[0]).strip()


def _score_answer(text: str, key: tuple[str, bytes, int, int, int], want: str, tag: str) -> float:
    task, options, seed, size, index = key
    dataset = _dataset(task, options, seed, size)
    entry = _dataset_entry(task, options, seed, size, index)
    if str(entry["answer"]) != want:
        raise RewardError(f"reasoning_gym: {task} gives another task each time for one seed, so it cannot be judged")
    return float(dataset.score_answer(extract_answer(text, tag=tag), entry))


def _options_key(options: Mapping[str, Any]) -> bytes:
    return msgspec.json.encode(options, order="sorted")


@lru_cache(maxsize=64)
def _dataset(task: str, options: bytes, seed: int, size: int) -> Any:
    try:
        import reasoning_gym as package  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ConfigError(f'the reward "reasoning_gym" needs a package: pip install reasoning-gym ({error})') from None
    return package.create_dataset(task, **msgspec.json.decode(options), seed=seed, size=size)


@lru_cache(maxsize=1024)
def _dataset_entry(task: str, options: bytes, seed: int, size: int, index: int) -> Any:
    return _dataset(task, options, seed, size)[index]
