"""Prompts from a JSON Lines file: one object a line, one column the text, the others handed to the reward functions.

Only the offsets of the rows are kept in memory; a row is read when it is asked for. The order of an epoch is a permutation drawn
from the seed and the epoch's number, so the position is all the state there is, and a row has the same id ("<epoch>/<row>")
wherever the shuffle puts it. Blank lines are no rows. Chat messages are not rendered: the column is text.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from corrente.config import Jsonl
from corrente.errors import ConfigError
from corrente.types import Prompt

Encode = Callable[[str], list[int]]


class JsonlPrompts:
    """Implements Prompts."""

    def __init__(self, config: Jsonl, encode: Encode, *, seed: int) -> None:
        self._config = config
        self._encode = encode
        self._seed = seed
        self._rows = RowFile(Path(config.path), key="prompts.path", column=config.column)
        self._epoch = 0
        self._position = 0
        self._order = self._shuffled(0)

    def next(self) -> Prompt | None:
        if self._position == len(self._rows):
            self._epoch, self._position = self._epoch + 1, 0
            self._order = self._shuffled(self._epoch)
        if self._config.epochs and self._epoch >= self._config.epochs:
            return None
        row = int(self._order[self._position])
        self._position += 1
        return self._make(self._epoch, row)

    def find(self, ids: Sequence[str]) -> tuple[Prompt, ...]:
        return tuple(self._make(*map(int, prompt_id.split("/"))) for prompt_id in ids)

    def state(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "position": self._position, "rows": len(self._rows)}

    def restore(self, state: dict[str, Any]) -> None:
        """Raises ConfigError when the file no longer has the rows the position was taken in."""
        if state["rows"] != len(self._rows):
            raise ConfigError(
                f"prompts.path = {self._config.path} has {len(self._rows)} rows, but had {state['rows']} when the "
                "checkpoint was written: resume with the same file"
            )
        self._epoch, self._position = int(state["epoch"]), int(state["position"])
        self._order = self._shuffled(self._epoch)

    def describe(self) -> str:
        epochs = "repeated for ever" if not self._config.epochs else f"{self._config.epochs} epochs"
        return f"{len(self._rows)} rows of {self._config.path}, {epochs}"

    def _make(self, epoch: int, row: int) -> Prompt:
        return _prompt(f"{epoch}/{row}", self._rows.read(row), self._config.column, self._encode)

    def _shuffled(self, epoch: int) -> np.ndarray:
        rows = len(self._rows)
        return np.random.default_rng((self._seed, epoch)).permutation(rows) if self._config.shuffle else np.arange(rows)


def held_out_rows(config: Jsonl, encode: Encode, *, count: int) -> tuple[Prompt, ...]:
    """The first ``count`` rows of ``eval_path``, in the file's order; none without such a file."""
    if not config.eval_path:
        return ()
    rows = RowFile(Path(config.eval_path), key="prompts.eval_path", column=config.column)
    return tuple(_prompt(f"eval/{row}", rows.read(row), config.column, encode) for row in range(min(count, len(rows))))


class RowFile:
    """Random access to the rows of a JSON Lines file. Raises ConfigError, with the line's number, for one that is not right."""

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

    def read(self, row: int) -> dict[str, Any]:
        with self._path.open("rb") as lines:
            lines.seek(self._offsets[row])
            return msgspec.json.decode(lines.readline(), type=dict[str, Any])


def verify(path: Path, *, key: str, column: str) -> frozenset[str]:
    """Read every row; return the columns that all of them have besides ``column``. Raises ConfigError at the first bad line."""
    common: frozenset[str] | None = None
    for number, row in _numbered(path, key=key):
        if column not in row:
            has = ", ".join(map(repr, row)) or "nothing"
            raise ConfigError(
                f"prompts.column = {column!r}: line {number} of {path} has no such column (it has {has}); "
                f"every row needs it"
            )
        if not isinstance(row[column], str):
            raise ConfigError(
                f"prompts.column = {column!r}: line {number} of {path} has {type(row[column]).__name__} there; "
                f"it must be text"
            )
        rest = frozenset(row) - {column}
        common = rest if common is None else common & rest
    if common is None:
        raise ConfigError(f"{key} = {path} has no rows: it must hold one JSON object a line with {column!r} in it")
    return common


def _numbered(path: Path, *, key: str) -> Iterator[tuple[int, dict[str, Any]]]:
    number = 0
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield number, msgspec.json.decode(line, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ConfigError(f"{key} = {path}: line {number} is not a JSON object: {error}") from None
    except FileNotFoundError:
        raise ConfigError(f"{key} = {path} does not exist") from None
    except OSError as error:
        raise ConfigError(f"{key} = {path} cannot be read: {error.strerror}") from None


def _prompt(prompt_id: str, row: dict[str, Any], column: str, encode: Encode) -> Prompt:
    text = row.pop(column, None)
    if not isinstance(text, str):
        raise ConfigError(f"prompts.column = {column!r}: row {prompt_id} has no text there; every row needs it")
    return Prompt(id=prompt_id, tokens=np.array(encode(text), np.int32), text=text, fields=row)
