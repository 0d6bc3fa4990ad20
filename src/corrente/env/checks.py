"""Conversations that cannot work, refused before a model is loaded. What is read is the user's modules."""

from __future__ import annotations

from collections.abc import Mapping

from corrente.config import RunConfig
from corrente.env import calls
from corrente.errors import ConfigError
from corrente.given import NOTHING, Given
from corrente.named import find
from corrente.playing import Environments, SingleTurn, Tools

__all__ = ["check"]


def check(config: RunConfig, given: Given = NOTHING) -> None:
    """Raise ConfigError for the first thing that cannot work. What is given counts as the config's."""
    section = config.env
    if given.env is not None and (given.tools or given.environment_factory is not None):
        raise ConfigError(
            "env, tools and environment_factory are given: an env is played as it is; leave the other two out"
        )
    _objects(given)
    if isinstance(section, SingleTurn) or given.env is not None:
        return
    calls.verify(section.calls)
    names = [find(name, key="env.functions").__name__ for name in section.functions]
    for at, name in enumerate(names):
        if name in names[:at]:
            raise ConfigError(f"env.functions: two tools are called {name!r}; the policy could not tell them apart")
    if isinstance(section, Tools) and not section.functions and not given.tools and not given.environment_factory:
        raise ConfigError('env.functions = []: env.kind = "tools" needs at least one')
    if isinstance(section, Environments) and given.environment_factory is None:
        if not section.factory:
            raise ConfigError('env.factory = "": env.kind = "environment" needs something that makes one')
        find(section.factory, key="env.factory")
    room = config.engine.max_context
    if room and section.max_total_tokens >= room:
        raise ConfigError(
            f"env.max_total_tokens = {section.max_total_tokens}: it must be below engine.max_context = {room}, to leave room for "
            "a prompt"
        )


def _objects(given: Given) -> None:
    for tool in given.tools:
        if not callable(tool):
            raise ConfigError(f"tools: {tool!r} given; each must be a function, with type hints and a docstring")
    factory = given.environment_factory
    if factory is None:
        return
    several = isinstance(factory, Mapping)
    for name, made in dict(factory).items() if several else [("", factory)]:
        if not callable(made) or (several and (not isinstance(name, str) or not name)):
            found = f"{name!r} is {made!r}" if several else f"{made!r} given"
            raise ConfigError(
                f"environment_factory: {found}; it must be callable, or a dictionary of names and callables"
            )
