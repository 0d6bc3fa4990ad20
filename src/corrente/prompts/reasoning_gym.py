"""Tasks of reasoning-gym, drawn without end: the n-th depends on the run's seed and n only.

A prompt's columns (``COLUMNS``) say how its task was made, as plain data from which the reward function makes it again;
``answer`` is one right answer, and for many tasks not the only one. A dataset that returns different tasks for one seed is
refused. Held-out tasks use seeds that training does not use; where a dataset has few tasks, some of them are trained on all the
same. A task is made on the event loop when its turn comes, so a dataset that takes seconds per task slows the run. The text is
plain, without a chat template.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np

from corrente.config import ReasoningGym
from corrente.data.types import Prompt
from corrente.errors import ConfigError
from corrente.prompts.procedural import ProceduralPrompts

Encode = Callable[[str], list[int]]

COLUMNS = frozenset(("task", "task_options", "task_seed", "task_index", "task_size", "answer"))
CHUNK = 512
"""Tasks drawn from one dataset before it is made again with another seed."""


class ReasoningGymPrompts(ProceduralPrompts):
    """Tasks drawn without end. ConfigError without the package, or for a task or option that it does not know."""

    def __init__(self, config: ReasoningGym, encode: Encode, *, seed: int) -> None:
        verify_reasoning_gym(config)

        def make(number: int) -> Prompt:
            return _make_prompt(f"0/{number}", config, encode, stream=str(seed), number=number)

        super().__init__(make, description=f"{', '.join(config.tasks)} of reasoning-gym, without end")


def held_out_tasks(config: ReasoningGym, encode: Encode, *, count: int) -> tuple[Prompt, ...]:
    """The first ``count`` held-out tasks, the same for every run."""
    return tuple(_make_prompt(f"eval/{n}", config, encode, stream="held out", number=n) for n in range(count))


def verify_reasoning_gym(config: ReasoningGym) -> None:
    """Raise ConfigError for settings that the package refuses. Imports the package, which takes seconds."""
    gym = import_reasoning_gym()
    names, tasks = gym.factory.DATASETS, config.tasks
    if not tasks:
        raise ConfigError("prompts.tasks = []: name at least one dataset of reasoning-gym")
    if config.weights and (len(config.weights) != len(tasks) or not any(config.weights)):
        raise ConfigError(f"prompts.weights = {list(config.weights)}: one per task is needed, and one above 0")
    if "{question}" not in config.template:
        raise ConfigError(f"prompts.template = {config.template!r}: it must have {{question}} in it")
    for task in (*tasks, *config.options):
        if task not in names:
            raise ConfigError(f"prompts.tasks: reasoning-gym has no {task!r}; it has {', '.join(sorted(names))}")
    for task in tasks:
        options = config.options.get(task, {})
        try:
            first, again = (gym.create_dataset(task, **options, seed=1, size=CHUNK)[1] for _ in range(2))
        except Exception as error:  # datasets check their own parameters, each in its own way
            raise ConfigError(f"prompts.options.{task} = {options}: {type(error).__name__}: {error}") from error
        if (first["question"], first["answer"]) != (again["question"], again["answer"]):
            raise ConfigError(f"prompts.tasks: {task!r} gives another task each time for one seed; leave it out")


def import_reasoning_gym() -> Any:
    """Import reasoning_gym. ConfigError, with the install command, where it is missing."""
    try:
        import reasoning_gym  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ConfigError(
            f'prompts.kind = "reasoning_gym" needs a package: pip install reasoning-gym ({error})'
        ) from None
    return reasoning_gym


@lru_cache(maxsize=64)
def _cached_dataset(task: str, options: bytes, seed: int) -> Any:
    return import_reasoning_gym().create_dataset(task, **msgspec.json.decode(options), seed=seed, size=CHUNK)


def _make_prompt(prompt_id: str, config: ReasoningGym, encode: Encode, *, stream: str, number: int) -> Prompt:
    draws = random.Random(f"corrente/reasoning_gym/{stream}/{number}")
    task = draws.choices(config.tasks, weights=config.weights or None)[0]
    chunk, index = divmod(number, CHUNK)
    digest = hashlib.blake2b(f"{stream}/{chunk}".encode(), digest_size=4).digest()
    seed, options = int.from_bytes(digest, "little") >> 1, config.options.get(task, {})  # below 2^31, as numpy's seeds
    entry = _cached_dataset(task, msgspec.json.encode(options, order="sorted"), seed)[index]
    text = config.template.replace("{question}", str(entry["question"]))
    return Prompt(
        id=prompt_id,
        tokens=np.array(encode(text), np.int32),
        text=text,
        fields={
            "task": task,
            "task_options": dict(options),
            "task_seed": seed,
            "task_index": index,
            "task_size": CHUNK,
            "answer": str(entry["answer"]),
        },
    )
