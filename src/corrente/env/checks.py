"""Refuses ``env`` settings that cannot work, before a model is loaded. It imports the user's modules."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from corrente.common.imports import import_callable
from corrente.config import RunConfig
from corrente.config.env import Environments, SingleTurn, Tools
from corrente.env import calls
from corrente.env.base import Env
from corrente.env.instance import implements_environment, is_tool_name
from corrente.env.tools import tool_schema
from corrente.errors import ConfigError

__all__ = ["check_env_settings"]


def check_env_settings(
    config: RunConfig,
    *,
    tools: Sequence[Callable[..., Any]] = (),
    environment_factory: Any = None,
    env: Env | None = None,
) -> None:
    """Raise ConfigError for the first thing that cannot work. The objects that were handed over count as the config's."""
    section = config.env
    if env is not None and (tools or environment_factory is not None):
        raise ConfigError(
            "env, tools and environment_factory are given: an env is played as it is; leave the other two out"
        )
    _check_objects(tools, environment_factory)
    if env is not None or (isinstance(section, SingleTurn) and not tools and environment_factory is None):
        return
    section = Tools() if isinstance(section, SingleTurn) else section
    calls.verify_call_format(section.calls)
    functions = tuple(tools) or tuple(import_callable(name, key="env.functions") for name in section.functions)
    names = [getattr(function, "__name__", repr(function)) for function in functions]
    for at, name in enumerate(names):
        if name in names[:at]:
            raise ConfigError(f"env.functions: two tools are called {name!r}; the policy could not tell them apart")
    if isinstance(section, Tools) and not section.functions and not tools and not environment_factory:
        raise ConfigError('env.functions = []: env.kind = "tools" needs at least one')
    if isinstance(section, Environments) and environment_factory is None:
        if not section.factory:
            raise ConfigError('env.factory = "": env.kind = "environment" needs something that makes one')
        environment_factory = import_callable(section.factory, key="env.factory")
    for function in (*functions, *_class_tools(environment_factory)):
        tool_schema(function)
    room = config.engine.max_context
    if room and section.max_total_tokens >= room:
        raise ConfigError(
            f"env.max_total_tokens = {section.max_total_tokens}: it must be below engine.max_context = {room}, to leave room for "
            "a prompt"
        )


def _class_tools(factory: Any) -> Iterator[Callable[..., Any]]:
    """The tools of environments that ``factory`` makes, as far as it is a class, or several: functions make what they like."""
    for made in factory.values() if isinstance(factory, Mapping) else (factory,):
        if isinstance(made, type) and not implements_environment(made):
            blank: Any = object()
            for name, function in inspect.getmembers(made, predicate=inspect.isfunction):
                if is_tool_name(name):
                    yield function.__get__(blank)


def _check_objects(tools: Sequence[Callable[..., Any]], factory: Any) -> None:
    for tool in tools:
        if not callable(tool):
            raise ConfigError(f"tools: {tool!r} given; each must be a function, with type hints and a docstring")
    if factory is None:
        return
    several = isinstance(factory, Mapping)
    for name, made in dict(factory).items() if several else [("", factory)]:
        if not callable(made) or (several and (not isinstance(name, str) or not name)):
            found = f"{name!r} is {made!r}" if several else f"{made!r} given"
            raise ConfigError(
                f"environment_factory: {found}; it must be callable, or a dictionary of names and callables"
            )
