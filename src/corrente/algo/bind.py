"""Functions of sections: a section's function with its keys bound as keyword arguments, a built-in one or the user's.

    sapo(inputs, *, temperature_pos, temperature_neg, ...)      a built-in function takes the keys of its section
    mine(inputs, *, low=0.5, high=2.0)                          the user's function takes every key of its table besides kind

A user's function is imported where it is called (the controller for advantages and filters, the learner for objectives) and
by the checks. What it raises ends the run, with its name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial, wraps
from typing import Any

import msgspec

from corrente.algo.kinds import ADVANTAGES, OBJECTIVES
from corrente.common.imports import import_callable, load_object
from corrente.config import Algo, Filter, schema
from corrente.config.section import Section, UserKind
from corrente.errors import ConfigError, CorrenteError, PipelineError, described

Function = Callable[..., Any]


def objective(algo: Algo) -> Function:
    """The function of ``algo.objective``. Raises ConfigError for a user's function that is not there or does not take its
    keys."""
    return _bind(algo.objective, OBJECTIVES[type(algo.objective)].function, key="algo.objective")


def advantage(algo: Algo) -> Function:
    """The function of ``algo.advantage``. Raises ConfigError as ``objective`` does."""
    return _bind(algo.advantage, ADVANTAGES[type(algo.advantage)].function, key="algo.advantage")


def filters(settings: Filter) -> dict[str, Function]:
    """The functions of ``filter.rules`` by their key in the config. Raises ConfigError as ``objective`` does."""
    keys = {f"filter.rules[{at}]": rule for at, rule in enumerate(settings.rules)}
    return {key: user_function(rule, key=key) for key, rule in keys.items()}


def check(algo: Algo, settings: Filter) -> None:
    """Raise ConfigError for a function of the user's that is not there, or does not take the keys it is given. Built-in functions
    are not imported."""
    for key, section in (("algo.objective", algo.objective), ("algo.advantage", algo.advantage)):
        if isinstance(section, UserKind):
            user_function(section, key=key)
    filters(settings)


def user_function(section: UserKind, *, key: str) -> Function:
    """The user's function with its options bound. ``key``: of the section, for messages."""
    builtins = schema.kinds(key) if key in schema.sections() else ()
    found = import_callable(section.function, key=f"{key}.kind", builtins=builtins)
    _check_options(found, section, key=key)

    @wraps(found)
    def call(*inputs: Any) -> Any:
        try:
            return found(*inputs, **section.options)
        except CorrenteError:
            raise
        except Exception as error:  # whatever the user's code raises
            raise PipelineError(f"{key}.kind = {section.function!r}: {described(error)}") from error

    return call


def _bind(section: Section, path: str, *, key: str) -> Function:
    if isinstance(section, UserKind):
        return user_function(section, key=key)
    return partial(load_object(path), **msgspec.structs.asdict(section))


def _check_options(function: Function, section: UserKind, *, key: str) -> None:
    """One positional argument, and an option for every keyword without a default."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # a signature that cannot be read is tried out by the run
        return
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = list(parameters)
    if not names or parameters[names[0]].kind not in (*positional, inspect.Parameter.VAR_POSITIONAL):
        raise ConfigError(
            f"{key}.kind = {section.function!r}: it takes no argument; its first one must be what it is computed from"
        )
    takes = {name: parameters[name] for name in names[1:]}
    _check_names(takes, section, key=key)
    for name, parameter in takes.items():
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        if parameter.default is parameter.empty and name not in section.options:
            raise ConfigError(f"{key}.{name} is missing: {section.function} needs it")
        if name in section.options and not _fits(section.options[name], parameter.annotation):
            words = schema.allowed(_SIMPLE[_name(parameter.annotation)])
            value = schema.show(section.options[name])
            raise ConfigError(f"{key}.{name} = {value}: {section.function} takes {words}")


def _check_names(takes: Mapping[str, inspect.Parameter], section: UserKind, *, key: str) -> None:
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in takes.values()):
        return
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    allowed = [name for name, parameter in takes.items() if parameter.kind in by_name]
    for name, value in section.options.items():
        if name not in allowed:
            raise ConfigError(
                f"{key}.{name} = {schema.show(value)}: {section.function} takes no {name!r} "
                f"(it takes {', '.join(allowed) or 'no options'})"
            )


_SIMPLE = {"int": int, "float": float, "str": str, "bool": bool}


def _name(annotation: Any) -> str:
    """The annotation's name; it is text already where the user's module postpones annotations."""
    return annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")


def _fits(value: Any, annotation: Any) -> bool:
    """True where a value is of the annotated type, if that is a number, text or flag. Other annotations are not judged."""
    hint = _SIMPLE.get(_name(annotation))
    if hint is None:
        return True
    try:
        msgspec.convert(value, hint)
    except msgspec.ValidationError:
        return False
    return True
