"""The schema of a config, read off the classes of ``config``: sections, kinds, keys, and each key's allowed values in words.

The loader, the error messages and the reference page all come from here, so they cannot disagree with the config classes.
Does not read files and holds no default of its own.
"""

from __future__ import annotations

import difflib
import re
import types
from collections.abc import Iterator
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from corrente.config import RunConfig

NONE = "none"
"""Switches an optional key off in a TOML file, which has no null."""

ELSEWHERE = {
    "batch_size": "run.prompts_per_step",
    "kl_coef": "algo.beta",
    "learning_rate": "learner.lr",
    "loss_type": "algo.loss",
    "max_completion_length": "sampling.max_tokens",
    "max_new_tokens": "sampling.max_tokens",
    "mask_truncated_completions": "algo.mask_truncated",
    "max_steps": "run.steps",
    "multi_objective_aggregation": "algo.advantage",
    "num_generations": "run.group_size",
    "num_train_epochs": "prompts.epochs",
    "reward_funcs": "reward.functions",
    "reward_weights": "reward.weights",
    "vllm_importance_sampling_clip_max": "staleness.correct_cap",
    "vllm_importance_sampling_clip_min": "staleness.correct_floor",
    "vllm_importance_sampling_mode": "staleness.correct",
}
"""Other trainers' names for keys, to point the way from a message."""

_LIKENESS = 0.6
_BARE = re.compile(r"[A-Za-z0-9_-]+")
"""A TOML key that needs no quotes."""


@cache
def sections() -> dict[str, tuple[type[msgspec.Struct], ...]]:
    """Section name -> its alternatives: one class, or one per ``kind``."""
    return {name: _alternatives(hint) for name, hint in get_type_hints(RunConfig, include_extras=True).items()}


def kinds(section: str) -> dict[str, type[msgspec.Struct]]:
    """``kind`` -> class; empty for a section that has no kind."""
    return {kind: cls for cls in sections()[section] if (kind := kind_of(cls))}


def kind_of(section: msgspec.Struct | type[msgspec.Struct]) -> str:
    """The kind of a section of a config, or of its class; empty when it has none."""
    tag = section.__struct_config__.tag
    return "" if tag is None else str(tag)


def default_kind(section: str) -> str:
    """The kind a section has when none is given."""
    return kind_of(getattr(RunConfig(), section))


@cache
def fields(cls: type[msgspec.Struct]) -> dict[str, Any]:
    """Key -> its type, constraints included, in order of declaration."""
    hints = get_type_hints(cls, include_extras=True)
    return {name: hints[name] for name in cls.__struct_fields__}


def required(cls: type[msgspec.Struct]) -> tuple[str, ...]:
    """Keys without a default."""
    return tuple(f.name for f in msgspec.structs.fields(cls) if f.required)


@cache
def all_keys() -> tuple[str, ...]:
    """Every "section.key", over all kinds."""
    keys: dict[str, None] = {}
    for section, classes in sections().items():
        if kinds(section):
            keys[f"{section}.kind"] = None
        keys.update(dict.fromkeys(f"{section}.{name}" for cls in classes for name in fields(cls)))
    return tuple(keys)


def nearest(key: str) -> str:
    """The valid key that looks most like ``key``, in any section; empty when none does."""
    leaf = key.rpartition(".")[2]
    if leaf in ELSEWHERE:
        return ELSEWHERE[leaf]
    scored = [(_likeness(key, candidate), candidate) for candidate in all_keys()]
    best, candidate = max(scored, key=lambda pair: pair[0])
    return candidate if best >= _LIKENESS else ""


@cache
def tables(hint: Any) -> dict[str, type[msgspec.Struct]]:
    """``kind`` -> class, of a key that is a list of tables; empty for any other key."""
    items = get_args(hint)[:1] if get_origin(hint) is tuple else ()
    classes = [
        cls for item in items for cls in _members(item) if isinstance(cls, type) and issubclass(cls, msgspec.Struct)
    ]
    return {kind_of(cls): cls for cls in classes}


def optional(hint: Any) -> bool:
    """True when the key may be switched off with "none"."""
    return type(None) in _members(hint)


def is_text(hint: Any) -> bool:
    """True when the key is a text."""
    return hint is str


def allowed(hint: Any) -> str:
    """A type and its constraints in words: "an integer of at least 2"."""
    if kinds_of_tables := tables(hint):
        return "a list of tables, each with a kind: " + ", ".join(map(show, kinds_of_tables))
    if get_origin(hint) is Literal:  # msgspec sorts the values; the order they are written in says more
        return "one of " + ", ".join(show(value) for value in get_args(hint))
    return _words(msgspec.inspect.type_info(hint))


def show(value: Any) -> str:
    """A value as TOML would write it; for messages and for ``dump``."""
    match value:
        case None:
            return f'"{NONE}"'
        case bool():
            return "true" if value else "false"
        case str():
            return _quote(value)
        case list() | tuple():
            return "[" + ", ".join(show(item) for item in value) + "]"
        case msgspec.Struct():
            kind = {"kind": kind_of(value)} if kind_of(value) else {}
            return show({**kind, **{key: getattr(value, key) for key in value.__struct_fields__}})
        case dict():
            return "{" + ", ".join(f"{_key(key)} = {show(item)}" for key, item in value.items()) + "}"
        case _:
            return str(value)


def _key(name: object) -> str:
    return name if isinstance(name, str) and _BARE.fullmatch(name) else _quote(str(name))


def _quote(text: str) -> str:
    # JSON's escapes are a subset of TOML's, except that TOML also refuses a bare DEL.
    return msgspec.json.encode(text).decode().replace("\x7f", "\\u007f")


def _alternatives(hint: Any) -> tuple[type[msgspec.Struct], ...]:
    return tuple(_members(hint)) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _members(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _likeness(key: str, candidate: str) -> float:
    """Likeness of the whole, or of section and last part on their own, whichever is greater."""
    whole = difflib.SequenceMatcher(None, key, candidate).ratio()
    section, _, leaf = key.rpartition(".")
    candidate_section, _, candidate_leaf = candidate.rpartition(".")
    if not section:
        return max(whole, difflib.SequenceMatcher(None, leaf, candidate_leaf).ratio() - 0.1)
    parts = 0.6 * difflib.SequenceMatcher(None, leaf, candidate_leaf).ratio() + 0.2 * (leaf == candidate_leaf)
    return max(whole, parts + 0.4 * difflib.SequenceMatcher(None, section, candidate_section).ratio())


def _words(info: msgspec.inspect.Type) -> str:
    match info:
        case msgspec.inspect.IntType():
            return f"an integer{_range(info)}"
        case msgspec.inspect.FloatType():
            return f"a number{_range(info)}"
        case msgspec.inspect.StrType():
            return "a text"
        case msgspec.inspect.BoolType():
            return "true or false"
        case msgspec.inspect.LiteralType(values=values):
            return " or ".join(map(show, values))
        case msgspec.inspect.DictType():
            return "a table"
        case msgspec.inspect.VarTupleType(item_type=item):
            return f"a list, each {_words(item)}"
        case msgspec.inspect.TupleType(item_types=items):
            return f"a list of {len(items)}, each {_words(items[0])}"
        case msgspec.inspect.UnionType(types=members):
            given = [_words(m) for m in members if not isinstance(m, msgspec.inspect.NoneType)]
            return " or ".join([*given, f'"{NONE}"'] if len(given) < len(members) else given)
        case _:
            return type(info).__name__


def _range(info: msgspec.inspect.IntType | msgspec.inspect.FloatType) -> str:
    bounds = list(_bounds(info))
    if not bounds:
        return ""
    return (" of " if bounds[0].startswith("at ") else " ") + " and ".join(bounds)


def _bounds(info: msgspec.inspect.IntType | msgspec.inspect.FloatType) -> Iterator[str]:
    words = (("gt", "above"), ("ge", "at least"), ("lt", "below"), ("le", "at most"))
    for attribute, word in words:
        bound = getattr(info, attribute)
        if bound is not None:
            yield f"{word} {bound:g}"
