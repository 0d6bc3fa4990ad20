"""Datasets of others as tables and streams: Parquet files, the Hugging Face hub, and what a program brings as an object.

    Parquet file or folder                               a table, by pyarrow, held in memory
    hub name, folder of data files, save_to_disk         a table, or a stream with ``streaming``, by datasets
    datasets.Dataset, list, anything with len and [i]    a table
    datasets.IterableDataset, iterable, function         a stream; a function is called anew each epoch

pyarrow and datasets are imported when they are needed: ``pip install "corrente[datasets]"``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from corrente.config import Dataset
from corrente.errors import ConfigError
from corrente.prompts.rows import Row, Table

INSTALL = 'pip install "corrente[datasets]"'


class Items:
    """Implements Table over what has a length and gives a dict for a number."""

    def __init__(self, items: Any, *, name: str) -> None:
        if not len(items):
            raise ConfigError(f"{name} has no rows")
        self._items, self._name = items, name

    def __len__(self) -> int:
        return len(self._items)

    def read(self, row: int) -> dict[str, Any]:
        found = self._items[row]
        if not isinstance(found, Mapping):
            raise ConfigError(f"{self._name}: row {row} is of type {type(found).__name__}; it must be a dict")
        return dict(found)


class RowStream:
    """Rows that can only be read from their beginning; ``begin`` does so, for an epoch by its number."""

    def __init__(self, begin: Callable[[int], Iterable[Row]]) -> None:
        self.begin = begin

    def __iter__(self) -> Iterator[Row]:
        return iter(self.begin(0))


def parquet(path: str, *, key: str) -> Table:
    """The rows of a Parquet file, or of the files of a folder. ConfigError, about ``key``, for what cannot be read."""
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import read_table
    except ImportError:
        raise ConfigError(f"{key} = {path!r}: Parquet needs pyarrow; {INSTALL}") from None
    try:
        table = read_table(_existing(path, key))
    except (OSError, ArrowException) as error:
        raise ConfigError(f"{key} = {path!r} cannot be read: {error}") from None
    return Items(_ArrowRows(table), name=path)


def parquet_columns(path: str, *, key: str) -> frozenset[str]:
    """The columns of a Parquet file, or of a folder's first, from its schema alone."""
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import read_schema
    except ImportError:
        raise ConfigError(f"{key} = {path!r}: Parquet needs pyarrow; {INSTALL}") from None
    place = _existing(path, key)
    file = next(iter(sorted(place.glob("*.parquet"))), None) if place.is_dir() else place
    if file is None:
        raise ConfigError(f"{key} = {path!r}: the folder holds no .parquet file")
    try:
        return frozenset(read_schema(file).names)
    except (OSError, ArrowException) as error:
        raise ConfigError(f"{key} = {path!r} cannot be read: {error}") from None


def hub(config: Dataset, split: str) -> Table | RowStream:
    """A split of a dataset on the hub or on disk. ConfigError, with what is wrong, for one that cannot be loaded."""
    try:
        import datasets
    except ImportError:
        raise ConfigError(f'prompts.kind = "dataset" needs the datasets library; {INSTALL}') from None
    where = f"prompts.path = {config.path!r}, split {split!r}"
    datasets.disable_progress_bars()
    try:
        saved = Path(config.path).is_dir() and _is_saved(Path(config.path))
        found = datasets.load_from_disk(config.path) if saved else _load(datasets, config, split)
    except Exception as error:  # the network, the hub and anybody's files: what comes is not ours to list
        raise ConfigError(f"{where} cannot be loaded: {type(error).__name__}: {error}") from error
    if isinstance(found, Mapping):
        if split not in found:
            raise ConfigError(f"{where}: there is no such split (it has {', '.join(map(str, found))})")
        found = found[split]
    return given(found, name=config.path)


def given(dataset: Any, *, name: str) -> Table | RowStream:
    """An object as a table or a stream. ConfigError, with the reason, for one that is neither."""
    if isinstance(dataset, Mapping):
        splits = ", ".join(map(str, dataset)) or "none"
        raise ConfigError(f"{name} is a dict of splits ({splits}); give one of them")
    if isinstance(dataset, str | bytes):
        raise ConfigError(f'{name} is a text; give the dataset itself, or name it with prompts.kind = "dataset"')
    if hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"):
        return Items(dataset, name=name)
    if isinstance(dataset, Iterator):
        raise ConfigError(
            f"{name} is an iterator, which can be read once, and neither repeated nor resumed; give the function that makes it"
        )
    if isinstance(dataset, Iterable):
        return RowStream(lambda epoch: _of_epoch(dataset, epoch))
    if callable(dataset):
        return RowStream(lambda epoch: _called(dataset, name))
    raise ConfigError(
        f"{name} is of type {type(dataset).__name__}; it must be a dataset, a list or an iterable of dicts, or a function "
        "that returns one"
    )


class _ArrowRows(Sequence[dict[str, Any]]):
    """The rows of an Arrow table as dicts."""

    def __init__(self, table: Any) -> None:
        self._table = table

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, row: Any) -> Any:
        return self._table.slice(row, 1).to_pylist()[0]


def _existing(path: str, key: str) -> Path:
    if not Path(path).exists():
        raise ConfigError(f"{key} = {path} does not exist")
    return Path(path)


def _is_saved(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("state.json", "dataset_dict.json"))


def _load(datasets: Any, config: Dataset, split: str) -> Any:
    return datasets.load_dataset(
        config.path,
        config.name or None,
        split=split,
        revision=config.revision or None,
        streaming=config.streaming,
    )


def _of_epoch(dataset: Any, epoch: int) -> Iterable[Row]:
    """A dataset that shuffles by itself is told the epoch, which decides its order."""
    if hasattr(dataset, "set_epoch"):
        dataset.set_epoch(epoch)
    return dataset


def _called(function: Callable[[], Any], name: str) -> Iterable[Row]:
    rows = function()
    if not isinstance(rows, Iterable):
        raise ConfigError(f"{name} returned {type(rows).__name__}; it must return an iterable of dicts")
    return rows
