"""Writes configuration.md, the reference of every key, from the config classes and their docstrings.

python docs/reference/generate.py            write it
python docs/reference/generate.py --check    exit 1 when it is not current
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from corrente.config import schema

PAGE = Path(__file__).with_name("configuration.md")

INTRO = """\
# Configuration

Every key, its default and what it may be. This page is generated from `src/corrente/config/` by
`docs/reference/generate.py`.

A config is one TOML file with a section per stage and axis; what is left out has its default. Any key can be set from the
command line, where it wins over the file:

```bash
corrente run examples/arithmetic.toml --dry-run --set run.steps=20 --set buffer.kind=double
```

- A value after `--set` is read as TOML, and taken as plain text where it is not: `--set 'sampling.stop=["\\n"]'`,
  `--set run.name=second`.
- A section may hold others, such as `[algo.objective]`; `--set algo.objective.kind=sapo` sets a key of one.
- Sections with a `kind` have the keys of that kind only. Choosing another kind on the command line drops the file's keys
  that it does not have; `buffer.kind` set there also drops a `staleness.max` that it would contradict.
- An optional key is switched off with `"none"`, for TOML has no null: `delta = "none"`.
- `sync.kind` follows `runtime.kind` when it is not given.
- Paths are looked up from the working directory; prompt, reward, model and adapter paths that do not exist there are looked up
  beside the config file.
- An unknown key is refused with the nearest valid name, and combinations that cannot work are refused before a model is
  loaded; exit code 2, nothing written.
"""


def main() -> None:
    page = render()
    if "--check" in sys.argv[1:]:
        sys.exit(PAGE.read_text(encoding="utf-8") != page)
    PAGE.write_text(page, encoding="utf-8")


def render() -> str:
    """The whole page."""
    parts = [INTRO]
    for section, classes in schema.sections().items():
        parts.append(f"\n## `{section}`\n")
        if not schema.kinds(section):
            parts += [_intro(classes[0]), _table(section, classes[0]), *_nested(section, classes[0])]
            continue
        default = schema.default_kind(section)
        for kind, cls in schema.kinds(section).items():
            mark = " (default)" if kind == default else ""
            parts += [f'\n### `{section}.kind = "{kind}"`{mark}\n', _intro(cls), _table(section, cls)]
        if users := schema.user_kind(section):
            parts += [f'\n### `{section}.kind = "path/to/file.py:function"`\n', _intro(users)]
    return "".join(parts)


def _nested(section: str, cls: type[msgspec.Struct]) -> Iterator[str]:
    """Of each key that is a list of tables, their kinds."""
    for key, hint in schema.fields(cls).items():
        for kind, table in schema.tables(hint).items():
            yield f'\n### `[[{section}.{key}]]`, `kind = "{kind}"`\n'
            yield from (_intro(table), _table("", table))


def _intro(cls: type[msgspec.Struct]) -> str:
    own = vars(cls).get("__doc__") or ""
    return f"\n{inspect.cleandoc(own)}\n" if own else ""


def _table(section: str, cls: type[msgspec.Struct]) -> str:
    if not schema.fields(cls):
        return ""
    rows = ["\n| key | default | allowed | |", "|---|---|---|---|"]
    texts = _docstrings(cls)
    for field in msgspec.structs.fields(cls):
        if field.name not in schema.fields(cls):  # a section of its own
            continue
        made = field.default_factory() if field.default_factory is not msgspec.NODEFAULT else field.default
        default = "required" if field.required else f"`{schema.show(made)}`"
        allowed = schema.allowed(schema.fields(cls)[field.name])
        rows.append(
            f"| `{f'{section}.' if section else ''}{field.name}` | {default} | {allowed} | {texts.get(field.name, '')} |"
        )
    return "\n".join(rows) + "\n"


def _docstrings(cls: type[msgspec.Struct]) -> dict[str, str]:
    """Field -> the text below it in the source, of the class and those it inherits from."""
    texts: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if base.__module__.startswith("corrente."):
            texts |= _own_docstrings(base)
    return texts


def _own_docstrings(cls: type) -> dict[str, str]:
    module = ast.parse(inspect.getsource(sys.modules[cls.__module__]))
    (node,) = [n for n in module.body if isinstance(n, ast.ClassDef) and n.name == cls.__name__]
    texts: dict[str, str] = {}
    for field, below in zip(node.body, node.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            assert isinstance(field.target, ast.Name)
            texts[field.target.id] = " ".join(str(below.value.value).split())
    return texts


if __name__ == "__main__":
    main()
