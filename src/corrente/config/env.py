"""How a prompt is played: the kinds of ``[env]`` in a config. Their code is in env/."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from corrente.config.section import Kind, Natural, Positive, Seconds


class SingleTurn(Kind, frozen=True, kw_only=True, tag="single"):
    """One completion, and no more."""


class EnvRules(Kind, frozen=True, kw_only=True):
    """Settings that all conversations have in common."""

    functions: tuple[str, ...] = ()
    """Tools the policy may call: "package.module:function", or "path/to/file.py:function", with type hints and a docstring."""
    max_turns: Positive = 8
    """Turns of the policy in an episode; past it nobody answers."""
    max_total_tokens: Natural = 0
    """Of an episode after its prompt, sampled and given ones together; 0: as many as the context leaves."""
    deadline_s: Seconds = 30.0
    """Of one call of a tool, one reset, or one step. A late tool is answered for; a late environment costs the episode."""
    at_once: Positive = 64
    """Synchronous calls at once, each in a thread; others wait, and the wait is part of the deadline."""
    calls: str = "auto"
    """How the policy writes calls: hermes, llama3, native (the tokenizer's response template), a JSON file with such a template,
    or a regular expression with a group "json", or groups "name" and "arguments". auto: what the chat template suggests."""
    history: Literal["rendered", "kept"] = "rendered"
    """What the policy reads of earlier turns. rendered: what the chat template makes of them, in a row of its own where that
    differs from what was sampled. kept: what was sampled, with what the template adds for new messages."""


class Tools(EnvRules, frozen=True, kw_only=True, tag="tools"):
    """A conversation with Python functions: until a turn calls none."""


class Environments(EnvRules, frozen=True, kw_only=True, tag="environment"):
    """A conversation with an environment: of the Environment protocol, or a class of TRL's shape (reset, methods as tools)."""

    factory: str = ""
    """Makes one, without arguments but ``options``: "package.module:name", or "path/to/file.py:name"."""
    options: dict[str, Any] = msgspec.field(default_factory=dict[str, Any])
    """Keyword arguments of the factory."""
    instances: Natural = 0
    """Played in at once; further episodes wait for one. 0: as many as there are episodes."""
