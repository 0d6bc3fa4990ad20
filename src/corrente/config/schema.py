"""The sections, kinds and keys a config may have, and each key's allowed values in words, read off the config classes.

A section may hold sections of its own, such as ``algo.objective``: they are listed beside the others under their full name. The
loader, the error messages and the reference page all come from here, so they cannot disagree with the config classes.
Does not read files and holds no default of its own.
"""

from __future__ import annotations

import difflib
import re
import types
from collections.abc import Iterator
from functools import cache
from operator import attrgetter
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from corrente.config import RunConfig
from corrente.config.section import UserKind

NONE = "none"
"""The value by which a TOML file switches an optional key off (TOML has no null)."""

ELSEWHERE = {
    "algo.delta": "algo.objective.delta",
    "algo.epsilon": "algo.objective.epsilon",
    "algo.epsilon_high": "algo.objective.epsilon_high",
    "algo.importance_sampling_level": "algo.objective.importance_sampling_level",
    "algo.loss": "algo.objective.kind",
    "algo.mask_high": "algo.objective.mask_high",
    "algo.mask_low": "algo.objective.mask_low",
    "algo.scale_rewards": "algo.advantage.scale_rewards",
    "algo.tau": "algo.objective.tau",
    "batch_size": "run.prompts_per_step",
    "kl_coef": "algo.beta",
    "learning_rate": "learner.lr",
    "loss_type": "algo.objective.kind",
    "max_completion_length": "sampling.max_tokens",
    "max_new_tokens": "sampling.max_tokens",
    "mask_truncated_completions": "algo.mask_truncated",
    "max_steps": "run.steps",
    "multi_objective_aggregation": "algo.advantage.kind",
    "num_generations": "run.group_size",
    "num_train_epochs": "prompts.epochs",
    "reward_funcs": "reward.functions",
    "reward_weights": "reward.weights",
    "sapo_temperature_neg": "algo.objective.temperature_neg",
    "sapo_temperature_pos": "algo.objective.temperature_pos",
    "vespo_k_neg": "algo.objective.k_neg",
    "vespo_k_pos": "algo.objective.k_pos",
    "vespo_lambda_neg": "algo.objective.lambda_neg",
    "vespo_lambda_pos": "algo.objective.lambda_pos",
    "vllm_importance_sampling_clip_max": "staleness.correct_cap",
    "vllm_importance_sampling_clip_min": "staleness.correct_floor",
    "vllm_importance_sampling_mode": "staleness.correct",
}
"""Keys that stand elsewhere: other trainers' names for them in any section, and keys of a section that are another's. Messages
point the way with it."""
USER_KIND = '"package.module:function" or "path/to/file.py:function"'
"""The name of a function of the user's, where a kind may be one."""

_LIKENESS = 0.6
_BARE = re.compile(r"[A-Za-z0-9_-]+")
"""A TOML key that needs no quotes."""


@cache
def sections() -> dict[str, tuple[type[msgspec.Struct], ...]]:
    """Section name -> its alternatives: one class, or one per ``kind``. A section inside another is named "outer.inner" and
    follows it; the class of a function of the user's is left out (``user_kind``)."""
    found: dict[str, tuple[type[msgspec.Struct], ...]] = {}
    for name, hint in get_type_hints(RunConfig, include_extras=True).items():
        found[name] = _built_in(hint)
        for cls in found[name]:
            inner = get_type_hints(cls, include_extras=True)
            found |= {
                f"{name}.{key}": _built_in(inner[key]) for key in cls.__struct_fields__ if _is_section(inner[key])
            }
    return found


def inner_sections(section: str) -> tuple[str, ...]:
    """The keys of a section that are sections themselves."""
    return tuple(name.removeprefix(f"{section}.") for name in sections() if name.startswith(f"{section}."))


def kinds(section: str) -> dict[str, type[msgspec.Struct]]:
    """``kind`` -> class; empty for a section that has no kind."""
    return {kind: cls for cls in sections()[section] if (kind := kind_of(cls))}


@cache
def user_kind(section: str) -> type[UserKind] | None:
    """The class of a function of the user's in a section; None where ``kind`` must be a built-in one."""
    outer, _, inner = section.rpartition(".")
    classes: tuple[type, ...] = sections()[outer] if outer else (RunConfig,)
    hints = [get_type_hints(cls, include_extras=True).get(inner) for cls in classes]
    return next((found for hint in hints if (found := user_kind_of(hint)) is not None), None)


def kind_of(section: msgspec.Struct | type[msgspec.Struct]) -> str:
    """The kind of a section of a config, or of its class: the name of the function where it is the user's; empty for none."""
    if isinstance(section, UserKind):
        return section.function
    tag = section.__struct_config__.tag
    return "" if tag is None else str(tag)


def find_section(config: RunConfig, name: str) -> msgspec.Struct:
    """The section of a config with this name, which may be "outer.inner"."""
    return attrgetter(name)(config)


def default_kind(section: str) -> str:
    """The kind a section has when none is given."""
    return kind_of(find_section(RunConfig(), section))


@cache
def fields(cls: type[msgspec.Struct]) -> dict[str, Any]:
    """Key -> its type, constraints included, in order of declaration; sections inside it left out. A function of the user's has
    no key that is known here."""
    hints = get_type_hints(cls, include_extras=True)
    if issubclass(cls, UserKind):
        return {}
    return {name: hints[name] for name in cls.__struct_fields__ if not _is_section(hints[name])}


def keys_of(section: msgspec.Struct) -> dict[str, Any]:
    """Key -> value of a section as a file says them, without its kind and the sections inside it."""
    if isinstance(section, UserKind):
        return section.options
    return {key: getattr(section, key) for key in fields(type(section))}


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
    for name in (key, key.rpartition(".")[2]):
        if name in ELSEWHERE:
            return ELSEWHERE[name]
    scored = [(_likeness(key, candidate), candidate) for candidate in all_keys()]
    best, candidate = max(scored, key=lambda pair: pair[0])
    return candidate if best >= _LIKENESS else ""


@cache
def tables(hint: Any) -> dict[str, type[msgspec.Struct]]:
    """``kind`` -> class, of a key that is a list of tables; empty for any other key, and for a list of the user's functions."""
    return {kind_of(cls): cls for cls in _table_classes(hint) if not issubclass(cls, UserKind)}


@cache
def user_table(hint: Any) -> type[UserKind] | None:
    """The class of a function of the user's, of a key that is a list of tables; None for any other key."""
    return next((cls for cls in _table_classes(hint) if issubclass(cls, UserKind)), None)


def user_kind_of(hint: Any) -> type[UserKind] | None:
    """The class of a function of the user's among the alternatives of a type; None where there is none."""
    return next((cls for cls in _members(hint) if isinstance(cls, type) and issubclass(cls, UserKind)), None)


def optional(hint: Any) -> bool:
    """True where the key may be switched off with "none"."""
    return type(None) in _members(hint)


def is_text(hint: Any) -> bool:
    """True when the key is a text."""
    return hint is str


def allowed(hint: Any) -> str:
    """A type and its constraints in words: "an integer of at least 2"."""
    names = [*map(show, tables(hint)), *([USER_KIND] if user_table(hint) else [])]
    if names:
        return "a list of tables, each with a kind: " + ", ".join(names)
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
            return show({**kind, **keys_of(value), **{key: getattr(value, key) for key in _sections_in(type(value))}})
        case dict():
            return "{" + ", ".join(f"{show_key(key)} = {show(item)}" for key, item in value.items()) + "}"
        case _:
            return str(value)


def show_key(name: object) -> str:
    """A key as TOML would write it."""
    return name if isinstance(name, str) and _BARE.fullmatch(name) else _quote(str(name))


def _quote(text: str) -> str:
    # JSON's escapes are a subset of TOML's, except that TOML also refuses a bare DEL.
    return msgspec.json.encode(text).decode().replace("\x7f", "\\u007f")


def _built_in(hint: Any) -> tuple[type[msgspec.Struct], ...]:
    return tuple(cls for cls in _members(hint) if not issubclass(cls, UserKind))


def _is_section(hint: Any) -> bool:
    """True where a key is a section: one config class, or several told apart by their kind."""
    return all(isinstance(cls, type) and issubclass(cls, msgspec.Struct) for cls in _members(hint))


def _sections_in(cls: type[msgspec.Struct]) -> tuple[str, ...]:
    hints = get_type_hints(cls, include_extras=True)
    return tuple(name for name in cls.__struct_fields__ if _is_section(hints[name]))


def _table_classes(hint: Any) -> tuple[type[msgspec.Struct], ...]:
    items = get_args(hint)[:1] if get_origin(hint) is tuple else ()
    return tuple(
        cls for item in items for cls in _members(item) if isinstance(cls, type) and issubclass(cls, msgspec.Struct)
    )


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
            names = [_words(m) for m in members if not isinstance(m, msgspec.inspect.NoneType)]
            return " or ".join([*names, f'"{NONE}"'] if len(names) < len(members) else names)
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
