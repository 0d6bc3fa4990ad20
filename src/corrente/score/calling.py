"""Arguments and answers of reward functions, here and in processes of their own. TRL's signature: any subset of

prompts, completions      one per episode of the group                trainer_state   how far the run is (TrainerState)
completion_ids            token ids, one list per episode             log_extra       log_extra(column, values)
any dataset column        that column's value, one per episode        log_metric      log_metric(name, value)
environments              the environment of each, if there is one

Prompts and completions are text, and lists of messages where the prompt is a conversation; a completion also where it became
one, with tools or an environment.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from corrente.common.plain_data import plain_text, to_plain
from corrente.data.messages import content_text
from corrente.data.types import Episode, Group, Prompt
from corrente.score.parse import ParsedScore, parse_answer_values
from corrente.score.resolve import accepted_arguments

Function = Callable[..., Any]


class TrainerState(msgspec.Struct, frozen=True, kw_only=True):
    """The run's progress when the group was admitted; names are those of transformers' TrainerState.

    ``global_step``: optimizer steps in the weights that were live. ``max_steps``: of the whole run. ``epoch``: of the prompt.
    """

    global_step: int = 0
    max_steps: int = 0
    epoch: float = 0.0


class FunctionAnswer(msgspec.Struct, kw_only=True):
    """A function's answer: a score per episode, and the values it logged."""

    readings: list[ParsedScore]
    extra: dict[str, list[Any]] = {}
    metrics: list[tuple[str, float]] = []


class FunctionLog:
    """Collects a function's ``log_extra`` and ``log_metric`` during one call. Wrong use is the function's fault: ValueError."""

    def __init__(self, count: int) -> None:
        self._count = count
        self.columns: dict[str, list[Any]] = {}
        self.metrics: list[tuple[str, float]] = []

    def extra(self, column: str, values: Sequence[Any]) -> None:
        """Record a value per episode, shown beside it where samples are written."""
        if len(values) != self._count:
            raise ValueError(f"log_extra({column!r}): {len(values)} values for {self._count} completions")
        self.columns[plain_text(str(column))] = [to_plain(value) for value in values]

    def metric(self, name: str, value: float) -> None:
        """Report a number; those of one name are averaged between two reports."""
        number = float(value)
        if not math.isfinite(number):
            raise ValueError(f"log_metric({name!r}): {number} is not a finite number")
        self.metrics.append((plain_text(str(name)), number))


def function_columns(group: Group) -> dict[str, list[Any]]:
    """Dataset columns, prompts, completions and environments, a value per episode. All but environments are copies: a function
    may change what it is given, and the dataset has its rows for the next epoch."""
    episodes, prompt = group.episodes, group.prompt
    out: dict[str, list[Any]] = {
        name: [copy.deepcopy(value) for _ in episodes] for name, value in prompt.fields.items()
    }
    asked, begun = split_opening(prompt.messages)
    out["prompts"] = [copy.deepcopy(asked) if prompt.messages else prompt.text for _ in episodes]
    out["completions"] = [
        answer_messages(e, begun=begun) if prompt.messages or e.messages else e.text for e in episodes
    ]
    out["completion_ids"] = [[int(t) for c in e.completions for t in c.tokens] for e in episodes]
    if any(e.environment is not None for e in episodes):
        out["environments"] = [e.environment for e in episodes]
    return out


def split_opening(messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], str]:
    """Split a prompt's messages: those before the answer, and the text of a last assistant message, which begins the answer."""
    said = [dict(message) for message in messages]
    if said and said[-1].get("role") == "assistant":
        return said[:-1], content_text(said[-1].get("content"))
    return said, ""


def answer_messages(episode: Episode, *, begun: str = "") -> list[dict[str, Any]]:
    """The messages after the prompt. ``begun``: text of the prompt that begins the first of them."""
    said = [copy.deepcopy(message) for message in episode.messages] or [{"role": "assistant", "content": episode.text}]
    if begun:
        said[0]["content"] = begun + content_text(said[0].get("content"))
    return said


def conversation_messages(prompt: Prompt, episode: Episode) -> list[dict[str, Any]]:
    """Prompt and completion as one conversation; empty where neither is a conversation."""
    if not prompt.messages and not episode.messages:
        return []
    asked, begun = split_opening(prompt.messages or [{"role": "user", "content": prompt.text}])
    return [*asked, *answer_messages(episode, begun=begun)]


def function_arguments(
    function: Function, function_columns: Mapping[str, list[Any]], state: TrainerState, log: FunctionLog
) -> dict[str, Any]:
    """Keyword arguments for ``function``: those on offer that it has parameters for."""
    takes = accepted_arguments(function)
    # Lists of their own: a function may change what it is given.
    offered: dict[str, Any] = {name: list(values) for name, values in function_columns.items()}
    offered |= {"trainer_state": state, "log_extra": log.extra, "log_metric": log.metric}
    return {name: value for name, value in offered.items() if takes is None or name in takes}


def parse_function_answer(name: str, answer: Any, log: FunctionLog, *, count: int) -> FunctionAnswer:
    """Parse a function's answer, and add the values it logged."""
    return FunctionAnswer(
        readings=parse_answer_values(name, answer, count=count), extra=log.columns, metrics=log.metrics
    )
