"""Prompts from rows of data: tables, which return any row at once, and streams, which are read from the beginning.

A row is a dict. One column is the prompt, as text or as a list of messages; the other columns are its fields, as plain data. The
order of an epoch depends only on the seed and the epoch's number, so the position is the only state, and a row has the same id
("<epoch>/<row>") wherever the shuffle puts it. A stream is shuffled within a window, and resumed by reading it again.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from corrente.common.plain_data import plain_data, plain_text, safe_text, to_plain
from corrente.data.types import Prompt, Tokens
from corrente.errors import ConfigError, RolloutError
from corrente.prompts.base import ENVIRONMENT_COLUMN, NO_PROMPT, ChatEncoder, Encode
from corrente.prompts.chat import parse_conversation

Row = Mapping[str, Any]


class Table(Protocol):
    """Contract: rows by number, the same at each call. ``read_row`` returns a dict that the caller may change."""

    def __len__(self) -> int: ...

    def read_row(self, row: int) -> dict[str, Any]: ...


def prompt_of_row(row: object, number: object, *, column: str, name: str) -> str | tuple[dict[str, Any], ...]:
    """The prompt of a row, as text or messages. ConfigError, with the number, ``column`` and ``name``, when it has none.

    ``name``: what messages call the source.
    """
    if not isinstance(row, Mapping):
        raise ConfigError(f"{name}: row {number} is of type {type(row).__name__}; it must be a dict")
    asked = _plain_value(row.get(column), row=number, column=column, name=name)
    if isinstance(asked, str):
        return asked
    messages = parse_conversation(asked)
    if messages is not None:
        return messages
    start = f"prompts.column = {column!r}: row {number} of {name} has "
    if column not in row:
        raise ConfigError(f"{start}no such column (it has {', '.join(map(repr, row)) or 'none'}); every row needs it")
    found = "nothing" if asked is None else type(asked).__name__
    raise ConfigError(f"{start}{found} there; it must be text or a list of messages, each with a role")


class RowReader:
    """Makes prompts of rows. ``name`` is what messages call the source; ``chat`` renders conversations.

    ``environments``: names that a row may have in its column "environment"; None: there are none to choose from. ``opens``:
    an environment brings the first messages, so that a row may be without a prompt. ``max_tokens``: of a longer prompt the last
    so many tokens are kept; 0: all.
    """

    def __init__(
        self,
        encode: Encode,
        *,
        column: str,
        name: str,
        chat: ChatEncoder | None = None,
        environments: Collection[str] | None = None,
        opens: bool = False,
        max_tokens: int = 0,
    ) -> None:
        self._encode, self._chat, self._column, self.name = encode, chat, column, name
        self._environments, self._opens, self._max_tokens = environments, opens, max_tokens

    def check_table(self, table: Table) -> None:
        """Raise ConfigError for the first row of a table that names an unknown environment."""
        for row, value in enumerate(column_values(table, ENVIRONMENT_COLUMN) if self._environments is not None else ()):
            check_environment(value, row, name=self.name, environments=self._environments or ())

    def make_prompt(self, prompt_id: str, row: Row) -> Prompt:
        """Make the prompt of a row, with its other columns as fields. ConfigError for a row that has no prompt."""
        if self._environments is not None:
            check_environment(row.get(ENVIRONMENT_COLUMN), prompt_id, name=self.name, environments=self._environments)
        fields = {name: value for name, value in row.items() if name != self._column}
        plain = {
            plain_text(str(name)): _plain_value(value, row=prompt_id, column=name, name=self.name)
            for name, value in fields.items()
        }
        if self._opens and row.get(self._column) is None:
            row = {self._column: [dict(message) for message in NO_PROMPT]}
        asked = prompt_of_row(row, prompt_id, column=self._column, name=self.name)
        if isinstance(asked, str):
            return Prompt(id=prompt_id, tokens=self._cut(self._encode(asked)), text=asked, fields=plain)
        if self._chat is None:
            raise ConfigError(f"{self.name}: row {prompt_id} is a conversation, and there is nothing to render it with")
        try:
            text, tokens = self._chat.prompt(asked)
        except RolloutError as error:
            raise ConfigError(f"{self.name}: row {prompt_id}: {error}") from error
        return Prompt(id=prompt_id, tokens=self._cut(tokens), text=text, messages=asked, fields=plain)

    def _cut(self, tokens: Sequence[int]) -> Tokens:
        return np.array(tokens[-self._max_tokens :] if self._max_tokens else tokens, np.int32)


def check_environment(value: object, row: object, *, name: str, environments: Collection[str]) -> None:
    """Raise ConfigError for a row whose column "environment" has a ``value`` that is no name of an environment."""
    if to_plain(value) not in environments:
        known = ", ".join(sorted(map(repr, environments)))
        raise ConfigError(
            f"{name}: row {row} has {value!r} in its column {ENVIRONMENT_COLUMN!r}; it must be one of {known}"
        )


def column_values(table: Table, column: str) -> Iterator[Any]:
    """The values of one column, row by row; None where a row has none."""
    whole = getattr(table, "read_column", None)
    found = whole(column) if whole is not None else None
    yield from found if found is not None else (table.read_row(row).get(column) for row in range(len(table)))


def _plain_value(value: Any, *, row: object, column: object, name: str) -> Any:
    """The value as plain data that a checkpoint can hold. ConfigError where it has no such form."""
    try:
        return plain_data(value)
    except Exception as error:  # a value of any type may raise anything when it is looked at
        raise ConfigError(
            f"{name}: the column {column!r} of row {row} is no plain data, and cannot be kept in a checkpoint "
            f"({safe_text(error)}); leave it out, or make it text, numbers, lists or dicts"
        ) from None


class TablePrompts:
    """Implements Prompts over a table: each epoch is a permutation of all rows."""

    def __init__(self, table: Table, reader: RowReader, *, epochs: int, shuffle: bool, seed: int) -> None:
        self._table, self._reader = table, reader
        self._epochs, self._shuffle, self._seed = epochs, shuffle, seed
        self._epoch, self._position = 0, 0
        self._order = self._epoch_order(0)
        reader.check_table(table)
        reader.make_prompt("0/0", table.read_row(0))  # a mistake in all rows is reported before a model is loaded

    def next_prompt(self) -> Prompt | None:
        if self._position == len(self._table):
            self._epoch, self._position = self._epoch + 1, 0
            self._order = self._epoch_order(self._epoch)
        if self._epochs and self._epoch >= self._epochs:
            return None
        prompt = self._make_prompt(self._epoch, int(self._order[self._position]))
        self._position += 1  # after making it: a bad row raises again, rather than being skipped, at the next call
        return prompt

    def find_prompts(self, ids: Sequence[str]) -> tuple[Prompt, ...]:
        return tuple(self._make_prompt(*map(int, prompt_id.split("/"))) for prompt_id in ids)

    def state(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "position": self._position, "rows": len(self._table)}

    def restore(self, state: dict[str, Any]) -> None:
        """Set the position. ConfigError when the table has another number of rows than when it was saved."""
        if state["rows"] != len(self._table):
            raise ConfigError(
                f"{self._reader.name} has {len(self._table)} rows, but had {state['rows']} when the checkpoint was "
                "written: resume with the same data"
            )
        self._epoch, self._position = int(state["epoch"]), int(state["position"])
        self._order = self._epoch_order(self._epoch)

    def describe(self) -> str:
        return f"{len(self._table)} rows of {self._reader.name}, {_describe_epochs(self._epochs)}"

    def _make_prompt(self, epoch: int, row: int) -> Prompt:
        return self._reader.make_prompt(f"{epoch}/{row}", self._table.read_row(row))

    def _epoch_order(self, epoch: int) -> np.ndarray:
        rows = len(self._table)
        return np.random.default_rng((self._seed, epoch)).permutation(rows) if self._shuffle else np.arange(rows)


class StreamPrompts:
    """Implements Prompts over a stream. ``open_epoch`` starts the stream of an epoch, with the same rows for the same number.

    ``window``: the rows in memory from which the next one is drawn; 1 takes the stream's own order.
    """

    def __init__(
        self, open_epoch: Callable[[int], Iterable[Row]], reader: RowReader, *, epochs: int, window: int, seed: int
    ) -> None:
        self._open_epoch, self._reader = open_epoch, reader
        self._epochs, self._window, self._seed = epochs, window, seed
        self._epoch, self._position = 0, 0
        self._rows: Iterator[tuple[int, Row]] | None = None

    def next_prompt(self) -> Prompt | None:
        while not self._epochs or self._epoch < self._epochs:
            if self._rows is None:
                self._rows = self._open_at(self._epoch, self._position)
            found = next(self._rows, None)
            if found is not None:
                prompt = self._reader.make_prompt(f"{self._epoch}/{found[0]}", found[1])
                self._position += 1
                return prompt
            if not self._position:
                raise ConfigError(f"{self._reader.name} has no rows")
            self._epoch, self._position, self._rows = self._epoch + 1, 0, None
        return None

    def find_prompts(self, ids: Sequence[str]) -> tuple[Prompt, ...]:
        """See Prompts.find_prompts. ConfigError when the stream has no rows or ends before one of them."""
        wanted: dict[int, set[int]] = {}
        for epoch, row in (map(int, prompt_id.split("/")) for prompt_id in ids):
            wanted.setdefault(epoch, set()).add(row)
        found = {prompt.id: prompt for epoch, rows in wanted.items() for prompt in self._find_rows(epoch, rows)}
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
        return f"the stream of {self._reader.name}, {_describe_epochs(self._epochs)}"

    def _open_at(self, epoch: int, skip: int) -> Iterator[tuple[int, Row]]:
        rows = self._shuffle_in_window(iter(enumerate(self._open_epoch(epoch))), epoch)
        for at in range(skip):
            if next(rows, None) is None:
                raise ConfigError(
                    f"{self._reader.name} ended after {at} rows, but the checkpoint was written after {skip} of the "
                    "epoch: resume with the same data"
                )
        return rows

    def _shuffle_in_window(self, rows: Iterator[tuple[int, Row]], epoch: int) -> Iterator[tuple[int, Row]]:
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

    def _find_rows(self, epoch: int, rows: set[int]) -> Iterator[Prompt]:
        left, at = set(rows), -1
        for at, row in enumerate(self._open_epoch(epoch)):
            if at in left:
                left.discard(at)
                yield self._reader.make_prompt(f"{epoch}/{at}", row)
            if not left:
                return
        if at < 0:
            raise ConfigError(f"{self._reader.name} has no rows")


def first_rows(source: Table | Iterable[Row], *, count: int) -> Iterator[tuple[int, Row]]:
    """The first ``count`` rows with their numbers, in their own order."""
    if hasattr(source, "read_row"):
        table: Any = source
        yield from ((row, table.read_row(row)) for row in range(min(count, len(table))))
        return
    stream: Any = source
    for row in enumerate(stream):
        if row[0] == count:
            return
        yield row


def _describe_epochs(epochs: int) -> str:
    return f"{epochs} epoch{'s' * (epochs != 1)}" if epochs else "repeated for ever"
