"""Refuses rewards that cannot work, before a model is loaded. It imports the user's reward modules."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from corrente.common import tls
from corrente.config import RunConfig
from corrente.config import rewards as s
from corrente.data.checkpoint_names import CHECKPOINTS, step_of_checkpoint
from corrente.errors import ConfigError
from corrente.models import pretrained
from corrente.score.build import scorer_names
from corrente.score.functions import function_members
from corrente.score.judge import template_fields
from corrente.score.processes import path_of
from corrente.score.resolve import (
    OFFERED_ARGUMENTS,
    Function,
    accepted_arguments,
    distinct_names,
    required_arguments,
    resolve_function,
)

__all__ = ["OFFERED_ARGUMENTS", "check_reward_settings", "needed_columns"]

AUTO_CLASSES: dict[type[s.ScorerConfig], str] = {
    s.RewardModelScorer: "AutoModelForSequenceClassification",
    s.ProcessRewardScorer: "AutoModelForTokenClassification",
    s.TeacherScorer: "AutoModelForCausalLM",
}
"""The class of transformers that each kind of model is loaded with."""

Needs = list[tuple[str, tuple[str, ...]]]
"""Config keys, each with the columns of the prompts that it cannot do without."""


def check_reward_settings(config: RunConfig, given: Sequence[Function] = (), *, rewarded: bool = False) -> None:
    """Raise ConfigError for the first thing that cannot work. ``given`` are functions in place of reward.functions; ``rewarded``:
    the environment may give rewards of its own, so that none has to be named."""
    reward = config.reward
    if not given and not reward.functions and not reward.scorers:
        if rewarded:
            return
        raise ConfigError("reward.functions = []: give at least one, or a [[reward.scorers]] table")
    functions = list(given) or [resolve_function(name) for name in reward.functions]
    listed = function_members(functions, weights=reward.weights)
    for at, scorer in enumerate(reward.scorers):
        _check_scorer(f"reward.scorers[{at}]", scorer, trust_remote_code=config.model.trust_remote_code)
    taken = [source.name for source, _ in listed] + scorer_names(config, [source.name for source, _ in listed])
    for at, name in enumerate(taken):
        if name in taken[:at]:
            raise ConfigError(
                f"reward.scorers: two of what the reward is made of are called {name!r}; name one differently"
            )
    teachers = [isinstance(scorer, s.Teaching) for scorer in reward.scorers]
    if all(teachers) and not functions and config.distill.loss == "none":
        raise ConfigError(
            "reward.scorers: a teacher gives no reward; give at least one function or another scorer, or set distill.loss"
        )


def needed_columns(config: RunConfig, given: Sequence[Function] = ()) -> Needs:
    """Columns that each function and judge needs of the prompts. ``given``: functions in place of reward.functions."""
    listed = list(given) or [resolve_function(name) for name in config.reward.functions]
    needs: Needs = [
        (f"reward.functions: {name}", _dataset_columns(f))
        for name, f in zip(distinct_names(listed), listed, strict=True)
    ]
    for at, scorer in enumerate(config.reward.scorers):
        if isinstance(scorer, s.FunctionScorer | s.ProcessScorer):
            needs.append((f"reward.scorers[{at}]: {scorer.function}", _dataset_columns(_with_options(scorer))))
        elif isinstance(scorer, s.JudgeScorer):
            asked = tuple(sorted(template_fields(scorer.template) - {"prompt", "completion"}))
            needs.append((f"reward.scorers[{at}].template", asked))
        elif isinstance(scorer, s.Teaching):
            needs.append((f"reward.scorers[{at}].where", tuple(sorted(scorer.where))))
    return needs


def _dataset_columns(function: Function) -> tuple[str, ...]:
    return tuple(name for name in required_arguments(function) if name not in OFFERED_ARGUMENTS)


def _with_options(scorer: s.FunctionScorer | s.ProcessScorer) -> Function:
    return functools.partial(resolve_function(scorer.function), **scorer.options)


def _check_scorer(where: str, scorer: s.ScorerConfig, *, trust_remote_code: bool) -> None:
    numbers = {key: value for key, value in msgspec.structs.asdict(scorer).items() if isinstance(value, float)}
    for key, value in numbers.items():
        if not math.isfinite(value):
            raise ConfigError(f"{where}.{key} = {value}: it must be a finite number")
    if "/" in scorer.name or scorer.name != scorer.name.strip():
        raise ConfigError(
            f"{where}.name = {scorer.name!r}: it names metrics and a file, so it must have no slash in it"
        )
    match scorer:
        case s.FunctionScorer() | s.ProcessScorer():
            _check_function(where, scorer)
        case s.JudgeScorer():
            _check_judge(where, scorer)
        case s.ServedTeacherScorer():
            _check_url(where, scorer)
            if not Path(scorer.tokenizer).is_dir():
                raise ConfigError(f"{where}.tokenizer = {scorer.tokenizer!r}: it must be a directory with a tokenizer")
            _check_code(f"{where}.tokenizer", scorer.tokenizer, ("AutoTokenizer",), trust_remote_code=trust_remote_code)
        case s.SelfTeacherScorer():
            pass
        case _:
            if not (Path(scorer.path) / "config.json").is_file():
                raise ConfigError(
                    f"{where}.path = {scorer.path!r}: it must be a directory with a Hugging Face model"
                    f"{_checkpoint_hint(scorer.path)}"
                )
            kinds = (AUTO_CLASSES[type(scorer)], "AutoTokenizer")
            _check_code(f"{where}.path", scorer.path, kinds, trust_remote_code=trust_remote_code)
    if isinstance(scorer, s.ProcessRewardScorer):
        _compile_pattern(f"{where}.delimiter", scorer.delimiter)
        if re.compile(scorer.delimiter).match("") or not scorer.separator:
            key, value = ("separator", "") if not scorer.separator else ("delimiter", scorer.delimiter)
            raise ConfigError(f"{where}.{key} = {value!r}: it must not be empty, nor match nothing at all")


def _check_code(key: str, folder: str, kinds: Sequence[str], *, trust_remote_code: bool) -> None:
    for kind in kinds:
        pretrained.verify_code(folder, kind=kind, trust_remote_code=trust_remote_code, key=key)


def _checkpoint_hint(path: str) -> str:
    """Hint at the checkpoints of a run, for a path among them that does not exist."""
    run, within, _ = path.partition(f"/{CHECKPOINTS}/")
    if not within:
        return ""
    found = sorted(
        place.name for place in Path(run, CHECKPOINTS).glob("*") if step_of_checkpoint(place.name) is not None
    )
    return f" ({run} has {', '.join(found)})" if found else f" ({run} has no checkpoint: train it first)"


def _check_function(where: str, scorer: s.FunctionScorer | s.ProcessScorer) -> None:
    function = resolve_function(scorer.function, key=f"{where}.function")
    takes = accepted_arguments(function)
    for name in scorer.options:
        if takes is not None and name not in takes:
            has = ", ".join(sorted(takes - set(OFFERED_ARGUMENTS)))
            raise ConfigError(f"{where}.options: {scorer.function} takes no {name!r} (it takes {has or 'none'})")
    if isinstance(scorer, s.ProcessScorer) and "environments" in required_arguments(function):
        raise ConfigError(
            f"{where}.function: {scorer.function} asks for environments, which are objects of this process; "
            'it must be of kind "function"'
        )
    if isinstance(scorer, s.ProcessScorer) and ":" not in scorer.function:
        path_of(function)


def _check_url(where: str, scorer: s.JudgeScorer | s.ServedTeacherScorer) -> None:
    if not re.match(r"https?://[^/]", scorer.url):
        raise ConfigError(f"{where}.url = {scorer.url!r}: it must begin with http:// or https:// and name a host")
    tls.ssl_context(scorer.verify, key=f"{where}.verify")


def _check_judge(where: str, scorer: s.JudgeScorer) -> None:
    _check_url(where, scorer)
    if not scorer.lowest < scorer.highest:
        raise ConfigError(f"{where}.lowest = {scorer.lowest:g}: it must be below highest = {scorer.highest:g}")
    if _compile_pattern(f"{where}.pattern", scorer.pattern).groups != 1:
        raise ConfigError(f"{where}.pattern = {scorer.pattern!r}: it must have one group, the number")
    template_fields(scorer.template)


def _compile_pattern(key: str, pattern: str) -> re.Pattern[Any]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"{key} = {pattern!r}: it must be a regular expression ({error})") from None
