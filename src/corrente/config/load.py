"""Reads TOML and ``--set a.b=c`` to a RunConfig, and writes it back. A fault is one line: the value, what is allowed, which key.

    load_config(path, overrides) -> RunConfig read, override, refuse what is unknown or out of range
    dump_config(config) -> str                  TOML that loads to the same config

A section may hold sections, such as ``[algo.objective]``, which have a kind and keys of their own. Where a kind may be the
name of a function of the user's, every other key of the table is one of its keyword arguments; the function is not imported here.

A value after ``--set`` is read as TOML, and taken as plain text where that fails or where the key is a text. Changing a section's
``kind`` from the command line drops the file's keys that the new kind does not have; a key given on the command line itself is
never dropped, but refused. A buffer kind set there likewise overrides the file's staleness.max. ``sync.kind`` follows
``runtime.kind`` when not given. Loads no model and writes nothing.
"""

from __future__ import annotations

import datetime
import difflib
import math
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from corrente.config import RunConfig, schema
from corrente.config.paths import expand_home, map_paths
from corrente.config.section import UserKind
from corrente.config.sync import SYNC_OF_RUNTIME
from corrente.errors import ConfigError

__all__ = ["dump_config", "load_config", "parse_config"]

COMMAND_LINE = "--set"
FIXED_MAX = {"none": 0, "double": 1}
"""Buffer kinds that fix staleness.max themselves."""
UNUSED_MAX = (*FIXED_MAX, "stream")

Raw = dict[str, dict[str, Any]]
"""Section name -> what is said of its keys; a section inside another is listed under "outer.inner"."""


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a config file, apply ``key=value`` overrides, and return what results. Raises ConfigError.

    A relative prompt, reward, model or adapter path that does not exist from the working directory but does beside the config
    file is taken from there. Combinations are not judged here: see ``entrypoints.checks``.
    """
    path = Path(path)
    return parse_config(_read(path), overrides, source=path.name, beside=path.parent)


def parse_config(
    tables: Mapping[str, Any],
    overrides: Sequence[str] = (),
    *,
    source: str = "the config",
    beside: Path | None = None,
) -> RunConfig:
    """``load_config`` for tables that are already in memory."""
    sections = _from_file(tables, source=source)
    if beside is not None:
        _find_beside(sections, beside)
    overridden = _from_command_line(overrides)
    _default_functions(sections, overridden)
    new_buffer = "kind" in overridden.get("buffer", {})
    _choose_kinds(sections, overridden)
    if new_buffer and sections["buffer"]["kind"] in UNUSED_MAX:
        sections["staleness"].pop("max", None)
    _check_max(sections, overridden)
    values: dict[str, Any] = {
        name: _section(name, sections, overridden, source) for name in schema.sections() if "." not in name
    }
    return map_paths(RunConfig(**values), expand_home)


def dump_config(config: RunConfig, *, notes: Sequence[str] = ()) -> str:
    """The config as TOML, every key present; ``notes`` become comments on top. ``load_config`` of it gives an equal config.

    staleness.max is left out where buffer.kind fixes it.
    """
    lines = [f"# {note}" for note in notes]
    buffer_kind = schema.kind_of(config.buffer)
    for name in schema.sections():
        section = schema.find_section(config, name)
        kind = schema.kind_of(section)
        lines += ["", f"[{name}]"] if lines else [f"[{name}]"]
        lines += [f"kind = {schema.show(kind)}"] if kind else []
        for key, value in schema.keys_of(section).items():
            if (name, key) == ("staleness", "max") and buffer_kind in UNUSED_MAX:
                continue
            lines.append(f"{schema.show_key(key)} = {schema.show(value)}")
    return "\n".join(lines) + "\n"


# ---- reading -----------------------------------------------------------------------------------------------------------------


def _read(path: Path) -> dict[str, Any]:
    if path.is_dir():
        raise ConfigError(f"config file {path} is a directory; give a TOML file, such as a run's config.toml")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"config file {path} does not exist") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {path} cannot be read: {error}") from None
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # that a number or a nesting is too long is no TOMLDecodeError
        raise ConfigError(f"{path} is not valid TOML: {error}") from None


def _from_file(tables: Mapping[str, Any], *, source: str) -> Raw:
    sections: Raw = {}
    for name, table in tables.items():
        if name not in schema.sections() or "." in name:
            inner = next(iter(table), "") if isinstance(table, dict) else ""
            raise _unknown(f"{name}.{inner}" if inner else name, source)
        sections[name] = dict(_as_table(name, table, source))
        for inner in schema.inner_sections(name):
            if inner in sections[name]:
                sections[f"{name}.{inner}"] = dict(_as_table(f"{name}.{inner}", sections[name].pop(inner), source))
    return sections


def _as_table(name: str, value: Any, source: str) -> Mapping[str, Any]:
    if isinstance(value, dict):
        return value
    kind = f" with a key kind = {schema.show(value)}" if isinstance(value, str) and schema.kinds(name) else ""
    raise ConfigError(f"{name} = {schema.show(value)} in {source}: {name} is a section, written [{name}]{kind}")


def _from_command_line(overrides: Sequence[str]) -> Raw:
    sections: Raw = {}
    for override in overrides:
        key, equals, text = override.partition("=")
        key = key.strip()
        if not equals:
            raise ConfigError(f"{COMMAND_LINE} {override}: no value; write {COMMAND_LINE} {key or 'section.key'}=VALUE")
        section, leaf = _split(key)
        if section not in schema.sections() or not leaf:
            raise _unknown(key, COMMAND_LINE)
        value = _value(section, leaf, text.strip())
        if leaf not in schema.inner_sections(section):
            sections.setdefault(section, {})[leaf] = value
        elif isinstance(value, dict):
            sections.setdefault(key, {}).update(value)
        else:
            raise ConfigError(
                f"{key} = {schema.show(value)} ({COMMAND_LINE}): {key} is a section; write {COMMAND_LINE} {key}.kind={text}"
            )
    return sections


def _split(key: str) -> tuple[str, str]:
    """Section and leaf of a key; the section may be one inside another."""
    section, _, leaf = key.partition(".")
    inner, dot, rest = leaf.partition(".")
    return (f"{section}.{inner}", rest) if dot and f"{section}.{inner}" in schema.sections() else (section, leaf)


def _value(section: str, leaf: str, text: str) -> Any:
    try:
        tables = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    value = tables["value"]
    types_of_key = [schema.fields(cls)[leaf] for cls in schema.sections()[section] if leaf in schema.fields(cls)]
    wants_text = leaf == "kind" or (bool(types_of_key) and all(map(schema.is_text, types_of_key)))
    return text if len(tables) > 1 or (wants_text and not isinstance(value, str)) else value


def _find_beside(sections: Raw, folder: Path) -> None:
    """Paths that exist only beside the config file are taken from there."""

    def found(text: Any) -> Any:
        if not isinstance(text, str) or not text or Path(text).exists() or not (folder / text).exists():
            return text
        return str(folder / text)

    for source in (*_tables_of(sections, "prompts", "sources"), *_tables_of(sections, "eval", "sources")):
        source |= {key: found(source[key]) for key in ("path", "eval_path") if key in source}
    for section, key in (("prompts", "path"), ("prompts", "eval_path"), ("model", "path"), ("adapters", "init")):
        if key in sections.get(section, {}):
            sections[section][key] = found(sections[section][key])

    def found_function(name: Any) -> Any:
        file, colon, attribute = name.rpartition(":") if isinstance(name, str) else ("", "", "")
        return f"{found(file)}{colon}{attribute}" if file.endswith(".py") else name

    env = sections.get("env", {})
    env |= {"factory": found_function(env["factory"])} if "factory" in env else {}
    if isinstance(env.get("functions"), list):
        env["functions"] = [found_function(name) for name in env["functions"]]
    reward = sections.get("reward", {})
    if isinstance(reward.get("functions"), list):
        reward["functions"] = [found_function(name) for name in reward["functions"]]
    for table in (*(sections.get(name, {}) for name in schema.sections()), *_tables_of(sections, "filter", "rules")):
        table |= {"kind": found_function(table["kind"])} if "kind" in table else {}
    for scorer in _tables_of(sections, "reward", "scorers"):
        scorer |= {"function": found_function(scorer["function"])} if "function" in scorer else {}
        scorer |= {"path": found(scorer["path"])} if "path" in scorer else {}


def _tables_of(sections: Raw, section: str, key: str) -> list[dict[str, Any]]:
    """The tables of a key that is a list of them, as far as it is one: what it should be is judged later."""
    value = sections.get(section, {}).get(key)
    return [table for table in value if isinstance(table, dict)] if isinstance(value, list) else []


# ---- what one section says ---------------------------------------------------------------------------------------------------


def _choose_kinds(sections: Raw, overridden: Raw) -> None:
    """Decide each section's kind, and drop the file's keys that a kind changed from the command line does not have."""
    for section in schema.sections():
        kinds = schema.kinds(section)
        table, here = sections.setdefault(section, {}), overridden.get(section, {})
        if not kinds:
            continue
        default = schema.default_kind(section)
        if section == "sync":
            default = SYNC_OF_RUNTIME.get(sections["runtime"]["kind"], default)
        before = table.get("kind", default)
        kind = here.pop("kind", before)
        if not isinstance(kind, str) or not (kind in kinds or _is_users(section, kind)):
            allowed = ", ".join(map(schema.show, kinds))
            users = f", or a function, {schema.USER_KIND}" if schema.user_kind(section) else ""
            raise ConfigError(f"{section}.kind = {schema.show(kind)}: it must be one of {allowed}{users}")
        table["kind"] = kind
        if kind != before:
            known = schema.fields(kinds[kind]) if kind in kinds else ()
            sections[section] = {k: v for k, v in table.items() if k == "kind" or k in known}


def _is_users(section: str, kind: str) -> bool:
    """True where a kind names a function of the user's, in a section where it may."""
    return ":" in kind and schema.user_kind(section) is not None


def _default_functions(sections: Raw, overridden: Raw) -> None:
    """Make reward.functions empty where there are scorers, unless it is set."""
    reward = {**sections.get("reward", {}), **overridden.get("reward", {})}
    if reward.get("scorers") and "functions" not in reward:
        sections.setdefault("reward", {})["functions"] = []


def _check_max(sections: Raw, overridden: Raw) -> None:
    """Check that staleness.max does not contradict a buffer kind that fixes it, and drop it where it repeats it."""
    kind = sections["buffer"]["kind"]
    here = overridden.get("staleness", {})
    value = here.get("max", sections["staleness"].get("max"))
    if kind not in UNUSED_MAX or value is None:
        return
    if kind in FIXED_MAX and value != FIXED_MAX[kind]:
        raise ConfigError(
            f'staleness.max = {schema.show(value)}: buffer.kind = "{kind}" fixes it at {FIXED_MAX[kind]}; leave it out, '
            f'or set buffer.kind = "window"'
        )
    if kind == "stream":
        raise ConfigError(
            f'staleness.max = {schema.show(value)}: buffer.kind = "stream" has no such limit; leave it out and use '
            "staleness.reject or staleness.mask"
        )
    here.pop("max", None)
    sections["staleness"].pop("max", None)


def _section(name: str, sections: Raw, set_here: Raw, source: str) -> msgspec.Struct:
    """One section from what the file and the command line say of it, with the sections that it holds."""
    table, here = sections.get(name, {}), set_here.get(name, {})
    kinds, users = schema.kinds(name), schema.user_kind(name)
    if users is not None and table["kind"] not in kinds:
        return _users_function(name, users, {**table, **here})
    cls = kinds[table["kind"]] if kinds else schema.sections()[name][0]
    values: dict[str, Any] = {
        key: _section(f"{name}.{key}", sections, set_here, source) for key in schema.inner_sections(name)
    }
    for origin, keys in ((source, table), (COMMAND_LINE, here)):
        for key, value in keys.items():
            if key == "kind" and kinds:
                continue
            values[key] = _convert(name, cls, key, value, origin)
    for key in schema.required(cls):
        if key not in values:
            chosen = f' with {name}.kind = "{table["kind"]}"' if kinds else ""
            raise ConfigError(f"{name}.{key} is missing{chosen}: it must be {schema.allowed(schema.fields(cls)[key])}")
    return cls(**values)


def _users_function(full: str, cls: type[UserKind], table: Mapping[str, Any]) -> UserKind:
    """A function of the user's by name, and all other keys of its table as its keyword arguments."""
    options = {key: _plain(f"{full}.{key}", value) for key, value in table.items() if key != "kind"}
    return cls(function=table["kind"], options=options)


def _convert(section: str, cls: type[msgspec.Struct], key: str, value: Any, origin: str) -> Any:
    full = f"{section}.{key}"
    if key not in schema.fields(cls):
        raise _wrong_kind(section, cls, key, origin) or _unknown(full, origin)
    hint = schema.fields(cls)[key]
    if schema.tables(hint) or schema.user_table(hint):
        return _tables(full, value, hint, origin)
    return _checked(full, value, hint)


def _tables(full: str, value: Any, hint: Any, origin: str) -> tuple[msgspec.Struct, ...]:
    """A list of tables, each of one of the kinds that ``hint`` says."""
    if not isinstance(value, list) or not all(isinstance(table, dict) for table in value):
        raise ConfigError(f"{full} = {schema.show(value)}: it must be a list of tables, each written [[{full}]]")
    return tuple(_table(f"{full}[{at}]", table, hint, origin) for at, table in enumerate(value))


def _table(full: str, table: Mapping[str, Any], hint: Any, origin: str) -> msgspec.Struct:
    kinds, users, kind = schema.tables(hint), schema.user_table(hint), str(table.get("kind", ""))
    if users is not None and ":" in kind:
        return _users_function(full, users, table)
    cls = kinds.get(kind)
    if cls is None:
        found = f"{full}.kind = {schema.show(table['kind'])}" if "kind" in table else f"{full}.kind is missing"
        names = [*map(schema.show, kinds), *([schema.USER_KIND] if users is not None else [])]
        raise ConfigError(f"{found}: it must be {'one of ' if kinds else ''}{', '.join(names)}")
    hints = schema.fields(cls)
    for key in table:
        if key != "kind" and key not in hints:
            near = difflib.get_close_matches(key, hints, 1)
            helps = f"did you mean {near[0]}?" if near else f"known are {', '.join(hints)}"
            raise ConfigError(f"unknown key {full}.{key} ({origin}): {helps}")
    for key in schema.required(cls):
        if key not in table:
            raise ConfigError(
                f'{full}.{key} is missing with kind = "{table["kind"]}": it must be {schema.allowed(hints[key])}'
            )
    return cls(**{key: _checked(f"{full}.{key}", value, hints[key]) for key, value in table.items() if key != "kind"})


def _checked(full: str, value: Any, hint: Any) -> Any:
    """A value of the type and within the range that ``hint`` says."""
    if value == schema.NONE and schema.optional(hint):
        return None
    try:
        converted = msgspec.convert(value, hint)
    except msgspec.ValidationError:
        converted = math.nan
    numbers = converted if isinstance(converted, tuple) else (converted,)
    if any(isinstance(number, float) and not math.isfinite(number) for number in numbers):
        raise ConfigError(f"{full} = {schema.show(value)}: it must be {schema.allowed(hint)}")
    return _plain(full, converted) if isinstance(converted, dict) else converted


def _plain(full: str, value: Any) -> Any:
    """A value of a free table as TOML gives it back. A program may bring what TOML has no word for."""
    match value:
        case dict() if all(isinstance(key, str) for key in value):
            return {key: _plain(f"{full}.{key}", item) for key, item in value.items()}
        case list() | tuple():
            return [_plain(f"{full}[{at}]", item) for at, item in enumerate(value)]
        case str() | int() | float() | datetime.date() | datetime.time():
            return value
        case _:
            raise ConfigError(
                f"{full} = {value!r}: it must be something that a config file can hold (text, number, true or false, date, "
                "list, or table with texts for keys); leave it out"
            )


def _wrong_kind(section: str, cls: type[msgspec.Struct], key: str, origin: str) -> ConfigError | None:
    owners = [kind for kind, other in schema.kinds(section).items() if key in schema.fields(other)]
    if not owners:
        return None
    belongs = " or ".join(f'"{owner}"' for owner in owners)
    return ConfigError(
        f'{section}.{key} ({origin}) is not a key of {section}.kind = "{schema.kind_of(cls)}": leave it out, or set '
        f"{section}.kind = {belongs}"
    )


def _unknown(key: str, origin: str) -> ConfigError:
    near = schema.nearest(key)
    if near:
        return ConfigError(f"unknown key {key} ({origin}): did you mean {near}?")
    section = key.partition(".")[0]
    known = [k for k in schema.all_keys() if k.startswith(f"{section}.")] or [f"[{name}]" for name in schema.sections()]
    return ConfigError(f"unknown key {key} ({origin}): known are {', '.join(known)}")
