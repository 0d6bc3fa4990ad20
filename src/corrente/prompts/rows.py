"""Rows to prompts: tables, which give any row at once, and streams, which are read from their beginning.

A row is a dict. Its prompt is one column, text or a list of messages; the others are its fields, as plain data. The order
of an epoch depends on the seed and the epoch's number alone, so the position is all the state there is, and a row has the same id
("<epoch>/<row>") wherever the shuffle puts it. A stream is shuffled within a window, and resumed by reading it again.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import msgspec
import numpy as np

from corrente.data.types import Prompt
from corrente.errors import ConfigError, RolloutError
from corrente.prompts.base import ChatEncoder, Encode
from corrente.prompts.chat import conversation

Row = Mapping[str, Any]


class Table(Protocol):
    """Contract: rows by number, the same each time. ``read`` gives a dict that the caller may change."""

    def __len__(self) -> int: ...

    def read(self, row: int) -> dict[str, Any]: ...


def said(row: object, number: object, *, column: str, name: str) -> str | tuple[dict[str, Any], ...]:
    """The prompt of a row, text or messages. ConfigError, with the row's number, the column and what the source is called, for
    one that has none."""
    if not isinstance(row, Mapping):
        raise ConfigError(f"{name}: row {number} is of type {type(row).__name__}; it must be a dict")
    asked = row.get(column)
    if isinstance(asked, str):
        return asked
    messages = conversation(asked)
    if messages is not None:
        return messages
    start = f"prompts.column = {column!r}: row {number} of {name} has "
    if column not in row:
        raise ConfigError(f"{start}no such column (it has {', '.join(map(repr, row)) or 'none'}); every row needs it")
    found = "nothing" if asked is None else type(asked).__name__
    raise ConfigError(f"{start}{found} there; it must be text or a list of messages, each with a role")


class Reader:
    """Makes prompts of rows. ``name`` is what messages call the source; ``chat`` renders conversations."""

    def __init__(self, encode: Encode, *, column: str, name: str, chat: ChatEncoder | None = None) -> None:
        self._encode, self._chat, self._column, self.name = encode, chat, column, name

    def make(self, prompt_id: str, row: Row) -> Prompt:
        """The prompt of a row. ConfigError, with the row and the column, for one that has none."""
        asked = said(row, prompt_id, column=self._column, name=self.name)
        fields = {name: value for name, value in row.items() if name != self._column}
        plain = {str(name): self._plain(prompt_id, name, value) for name, value in fields.items()}
        if isinstance(asked, str):
            return Prompt(id=prompt_id, tokens=np.array(self._encode(asked), np.int32), text=asked, fields=plain)
        if self._chat is None:
            raise ConfigError(f"{self.name}: row {prompt_id} is a conversation, and there is nothing to render it with")
        try:
            text, tokens = self._chat.prompt(asked)
        except RolloutError as error:
            raise ConfigError(f"{self.name}: row {prompt_id}: {error}") from error
        return Prompt(id=prompt_id, tokens=np.array(tokens, np.int32), text=text, messages=asked, fields=plain)

    def _plain(self, prompt_id: str, name: object, value: Any) -> Any:
        """A value that can be kept in a checkpoint; of numpy's, Python's."""
        item = value.tolist() if isinstance(value, np.ndarray | np.generic) else value
        try:
            msgspec.msgpack.encode(item)
        except (TypeError, OverflowError) as error:
            raise ConfigError(
                f"{self.name}: the column {name!r} of row {prompt_id} is no plain data, and cannot be kept in a "
                f"checkpoint ({error}); leave it out, or make it text, numbers, lists or dicts"
            ) from None
        return item


class TablePrompts:
    """Implements Prompts over a table: an epoch is a permutation of all of it."""

    def __init__(self, table: Table, reader: Reader, *, epochs: int, shuffle: bool, seed: int) -> None:
        self._table, self._reader = table, reader
        self._epochs, self._shuffle, self._seed = epochs, shuffle, seed
        self._epoch, self._position = 0, 0
        self._order = self._shuffled(0)
        reader.make("0/0", table.read(0))  # what is wrong with every row is told before a model is loaded

    def next(self) -> Prompt | None:
        if self._position == len(self._table):
            self._epoch, self._position = self._epoch + 1, 0
            self._order = self._shuffled(self._epoch)
        if self._epochs and self._epoch >= self._epochs:
            return None
        prompt = self._make(self._epoch, int(self._order[self._position]))
        self._position += 1  # after it: a row that is no prompt is not passed over by whoever goes on
        return prompt

    def find(self, ids: Sequence[str]) -> tuple[Prompt, ...]:
        return tuple(self._make(*map(int, prompt_id.split("/"))) for prompt_id in ids)

    def state(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "position": self._position, "rows": len(self._table)}

    def restore(self, state: dict[str, Any]) -> None:
        """Raises ConfigError when the table no longer has the rows the position was taken in."""
        if state["rows"] != len(self._table):
            raise ConfigError(
                f"{self._reader.name} has {len(self._table)} rows, but had {state['rows']} when the checkpoint was "
                "written: resume with the same data"
            )
        self._epoch, self._position = int(state["epoch"]), int(state["position"])
        self._order = self._shuffled(self._epoch)

    def describe(self) -> str:
        return f"{len(self._table)} rows of {self._reader.name}, {_repeated(self._epochs)}"

    def _make(self, epoch: int, row: int) -> Prompt:
        return self._reader.make(f"{epoch}/{row}", self._table.read(row))

    def _shuffled(self, epoch: int) -> np.ndarray:
        rows = len(self._table)
        return np.random.default_rng((self._seed, epoch)).permutation(rows) if self._shuffle else np.arange(rows)


class StreamPrompts:
    """Implements Prompts over a stream. ``open`` begins the stream of an epoch anew, with the same rows for the same number.

    ``window``: rows held in memory, from which the next is drawn; 1: the stream's own order.
    """

    def __init__(
        self, open: Callable[[int], Iterable[Row]], reader: Reader, *, epochs: int, window: int, seed: int
    ) -> None:
        self._open, self._reader = open, reader
        self._epochs, self._window, self._seed = epochs, window, seed
        self._epoch, self._position = 0, 0
        self._rows: Iterator[tuple[int, Row]] | None = None

    def next(self) -> Prompt | None:
        while not self._epochs or self._epoch < self._epochs:
            if self._rows is None:
                self._rows = self._begin(self._epoch, self._position)
            found = next(self._rows, None)
            if found is not None:
                prompt = self._reader.make(f"{self._epoch}/{found[0]}", found[1])
                self._position += 1
                return prompt
            if not self._position:
                raise ConfigError(f"{self._reader.name} has no rows")
            self._epoch, self._position, self._rows = self._epoch + 1, 0, None
        return None

    def find(self, ids: Sequence[str]) -> tuple[Prompt, ...]:
        """ConfigError when the stream ends before it comes to one of them, or has no rows at all."""
        wanted: dict[int, set[int]] = {}
        for epoch, row in (map(int, prompt_id.split("/")) for prompt_id in ids):
            wanted.setdefault(epoch, set()).add(row)
        found = {prompt.id: prompt for epoch, rows in wanted.items() for prompt in self._pick(epoch, rows)}
        if missing := [prompt_id for prompt_id in ids if prompt_id not in found]:
            raise ConfigError(
                f"{self._reader.name} has no row {missing[0]}, which the checkpoint has: resume with the same data"
            )
        return tuple(found[prompt_id] for prompt_id in ids)

    def state(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "position": self._position}

    def restore(self, state: dict[str, Any]) -> None:
        self._epoch, self._position, self._rows = int(state["epoch"]), int(state["position"]), None

    def describe(self) -> str:
        return f"the stream of {self._reader.name}, {_repeated(self._epochs)}"

    def _begin(self, epoch: int, skip: int) -> Iterator[tuple[int, Row]]:
        rows = self._drawn(iter(enumerate(self._open(epoch))), epoch)
        for at in range(skip):
            if next(rows, None) is None:
                raise ConfigError(
                    f"{self._reader.name} ended after {at} rows, but the checkpoint was written after {skip} of the "
                    "epoch: resume with the same data"
                )
        return rows

    def _drawn(self, rows: Iterator[tuple[int, Row]], epoch: int) -> Iterator[tuple[int, Row]]:
        if self._window == 1:
            yield from rows
            return
        rng = random.Random(f"corrente/stream/{self._seed}/{epoch}")
        held: list[tuple[int, Row]] = []
        for row in rows:
            if len(held) < self._window:
                held.append(row)
                continue
            at = rng.randrange(self._window)
            held[at], row = row, held[at]
            yield row
        rng.shuffle(held)
        yield from held

    def _pick(self, epoch: int, rows: set[int]) -> Iterator[Prompt]:
        left, at = set(rows), -1
        for at, row in enumerate(self._open(epoch)):
            if at in left:
                left.discard(at)
                yield self._reader.make(f"{epoch}/{at}", row)
            if not left:
                return
        if at < 0:
            raise ConfigError(f"{self._reader.name} has no rows")


def first_rows(source: Table | Iterable[Row], *, count: int) -> Iterator[tuple[int, Row]]:
    """The first ``count`` rows with their numbers, in their own order."""
    if hasattr(source, "read"):
        table: Any = source
        yield from ((row, table.read(row)) for row in range(min(count, len(table))))
        return
    stream: Any = source
    for row in enumerate(stream):
        if row[0] == count:
            return
        yield row


def _repeated(epochs: int) -> str:
    return f"{epochs} epoch{'s' * (epochs != 1)}" if epochs else "repeated for ever"
