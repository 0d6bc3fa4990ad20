"""Read a JSON Lines file as a table: one object per line. Blank lines are no rows.

Only the offsets of the rows are in memory; a row is read when it is needed.
"""

from __future__ import annotations

import json
from array import array
from codecs import BOM_UTF8
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from corrente.errors import ConfigError
from corrente.prompts.chat import parse_conversation


class JsonlTable:
    """Implements Table over a JSON Lines file. ConfigError, which names ``key``, when it cannot be read or has no rows."""

    def __init__(self, path: Path, *, key: str, column: str) -> None:
        self._path = path
        self._offsets = array("q")
        at = 0
        try:
            with path.open("rb") as lines:
                for line in lines:
                    if line.strip():
                        self._offsets.append(at)
                    at += len(line)
        except OSError as error:
            raise ConfigError(f"{key} = {path} cannot be read: {error.strerror}") from None
        if not self._offsets:
            raise ConfigError(f"{key} = {path} has no rows: it must hold one JSON object a line with {column!r} in it")

    def __len__(self) -> int:
        return len(self._offsets)

    def read_row(self, row: int) -> dict[str, Any]:
        with self._path.open("rb") as lines:
            lines.seek(self._offsets[row])
            return _decode_row(lines.readline())


def verify_jsonl(path: Path, *, key: str, column: str) -> frozenset[str]:
    """Read every row and return the columns that all of them have besides ``column``. ConfigError for the first bad line."""
    common: frozenset[str] | None = None
    for number, row in _numbered_rows(path, key=key):
        if column not in row:
            has = ", ".join(map(repr, row)) or "nothing"
            raise ConfigError(
                f"prompts.column = {column!r}: line {number} of {path} has no such column (it has {has}); "
                f"every row needs it"
            )
        if not isinstance(row[column], str) and parse_conversation(row[column]) is None:
            raise ConfigError(
                f"prompts.column = {column!r}: line {number} of {path} has {type(row[column]).__name__} there; "
                f"it must be text or a list of messages, each with a role"
            )
        rest = frozenset(row) - {column}
        common = rest if common is None else common & rest
    if common is None:
        raise ConfigError(f"{key} = {path} has no rows: it must hold one JSON object a line with {column!r} in it")
    return common


def _decode_row(line: bytes) -> dict[str, Any]:
    """The object of a line. ValueError, or RecursionError, where it holds none."""
    line = line.removeprefix(BOM_UTF8)
    try:
        return msgspec.json.decode(line, type=dict[str, Any])
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError:
        row = json.loads(line)  # which takes what Python writes: NaN, and half a surrogate pair
        if not isinstance(row, dict):
            raise ValueError(f"expected an object, got {type(row).__name__}") from None
        return row


def _numbered_rows(path: Path, *, key: str) -> Iterator[tuple[int, dict[str, Any]]]:
    number = 0
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield number, _decode_row(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{key} = {path}: line {number} is not a JSON object: {error}") from None
    except FileNotFoundError:
        raise ConfigError(f"{key} = {path} does not exist") from None
    except OSError as error:
        raise ConfigError(f"{key} = {path} cannot be read: {error.strerror}") from None
