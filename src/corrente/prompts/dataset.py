"""Read other datasets as tables and streams: Parquet files, the Hugging Face hub, and objects that a program passes.

    Parquet file or folder                               a table, by pyarrow, held in memory
    hub name, folder of data files, save_to_disk         a table, or a stream with ``streaming``, by datasets
    datasets.Dataset, list, anything with len and [i]    a table
    pandas.DataFrame, pyarrow.Table                      a table
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


class SequenceTable:
    """Implements Table over an object with a length that returns a dict for an index."""

    def __init__(self, items: Any, *, name: str) -> None:
        if not len(items):
            raise ConfigError(f"{name} has no rows")
        self._items, self._name = items, name

    def __len__(self) -> int:
        return len(self._items)

    def read_row(self, row: int) -> dict[str, Any]:
        found = self._items[row]
        if not isinstance(found, Mapping):
            raise ConfigError(f"{self._name}: row {row} is of type {type(found).__name__}; it must be a dict")
        return dict(found)

    def read_column(self, column: str) -> Any:
        """The values of a column, of a dataset that has them together; None where the rows have to be read."""
        names = getattr(self._items, "column_names", None)
        return self._items[column] if names is not None and column in names else None


class RowStream:
    """Rows that can only be read from the beginning; ``open_epoch(n)`` starts reading them for epoch n."""

    def __init__(self, open_epoch: Callable[[int], Iterable[Row]]) -> None:
        self.open_epoch = open_epoch

    def __iter__(self) -> Iterator[Row]:
        return iter(self.open_epoch(0))


def open_parquet(path: str, *, key: str) -> Table:
    """Open a Parquet file, or the files of a folder, as a table. ConfigError, which names ``key``, when it cannot be read."""
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import read_table
    except ImportError:
        raise ConfigError(f"{key} = {path!r}: Parquet needs pyarrow; {INSTALL}") from None
    try:
        table = read_table(_existing_path(path, key))
    except (OSError, ArrowException) as error:
        raise ConfigError(f"{key} = {path!r} cannot be read: {error}") from None
    return SequenceTable(_ArrowRows(table), name=path)


def parquet_columns(path: str, *, key: str) -> frozenset[str]:
    """The columns of a Parquet file, or of the first file of a folder, read from its schema. ConfigError as open_parquet."""
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import read_schema
    except ImportError:
        raise ConfigError(f"{key} = {path!r}: Parquet needs pyarrow; {INSTALL}") from None
    place = _existing_path(path, key)
    file = next(iter(sorted(place.glob("*.parquet"))), None) if place.is_dir() else place
    if file is None:
        raise ConfigError(f"{key} = {path!r}: the folder holds no .parquet file")
    try:
        return frozenset(read_schema(file).names)
    except (OSError, ArrowException) as error:
        raise ConfigError(f"{key} = {path!r} cannot be read: {error}") from None


def load_hub_dataset(config: Dataset, split: str) -> Table | RowStream:
    """Load a split of a dataset on the hub or on disk. ConfigError, with the reason, when it cannot be loaded."""
    try:
        import datasets
    except ImportError:
        raise ConfigError(f'prompts.kind = "dataset" needs the datasets library; {INSTALL}') from None
    where = f"prompts.path = {config.path!r}, split {split!r}"
    datasets.disable_progress_bars()
    try:
        saved = Path(config.path).is_dir() and _is_saved_dataset(Path(config.path))
        found = datasets.load_from_disk(config.path) if saved else _load_split(datasets, config, split)
    except Exception as error:  # datasets documents no list of errors for the network, the hub and broken files
        raise ConfigError(f"{where} cannot be loaded: {type(error).__name__}: {error}") from error
    if isinstance(found, Mapping):
        if split not in found:
            raise ConfigError(f"{where}: there is no such split (it has {', '.join(map(str, found))})")
        found = found[split]
    return wrap_dataset(found, name=config.path)


def wrap_dataset(dataset: Any, *, name: str) -> Table | RowStream:
    """Wrap an object as a table or a stream. ConfigError, with the reason, when it can be neither."""
    if isinstance(dataset, Mapping):
        splits = ", ".join(map(str, dataset)) or "none"
        raise ConfigError(f"{name} is a dict of splits ({splits}); give one of them")
    if hasattr(dataset, "iloc") and hasattr(dataset, "columns"):
        return SequenceTable(_FrameRows(dataset), name=name)
    if hasattr(dataset, "num_rows") and callable(getattr(dataset, "to_pylist", None)):
        return SequenceTable(_ArrowRows(dataset), name=name)
    if isinstance(dataset, str | bytes):
        raise ConfigError(f'{name} is a text; give the dataset itself, or name it with prompts.kind = "dataset"')
    if hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"):
        return SequenceTable(dataset, name=name)
    if isinstance(dataset, Iterator):
        raise ConfigError(
            f"{name} is an iterator, which can be read once, and neither repeated nor resumed; give the function that makes it"
        )
    if isinstance(dataset, Iterable):
        return RowStream(lambda epoch: _set_epoch(dataset, epoch))
    if callable(dataset):
        return RowStream(lambda epoch: _call_source(dataset, name))
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


class _FrameRows(Sequence[dict[str, Any]]):
    """The rows of a pandas DataFrame as dicts. What is missing is None, but in columns of floats."""

    def __init__(self, frame: Any) -> None:
        self._frame = frame
        self.column_names = [str(name) for name in frame.columns]
        self._floats = [getattr(kind, "kind", "") == "f" for kind in frame.dtypes]

    def __len__(self) -> int:
        return len(self._frame)

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            place = self.column_names.index(key)
            return [self._value(row, place) for row in range(len(self))]
        return {name: self._value(key, place) for place, name in enumerate(self.column_names)}

    def _value(self, row: int, place: int) -> Any:
        value = self._frame.iat[row, place]
        return None if isinstance(value, float) and value != value and not self._floats[place] else value


def _existing_path(path: str, key: str) -> Path:
    if not Path(path).exists():
        raise ConfigError(f"{key} = {path} does not exist")
    return Path(path)


def _is_saved_dataset(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("state.json", "dataset_dict.json"))


def _load_split(datasets: Any, config: Dataset, split: str) -> Any:
    return datasets.load_dataset(
        config.path,
        config.name or None,
        split=split,
        revision=config.revision or None,
        streaming=config.streaming,
    )


def _set_epoch(dataset: Any, epoch: int) -> Iterable[Row]:
    """Tell the epoch to a dataset that shuffles by itself, since the epoch decides its order."""
    if hasattr(dataset, "set_epoch"):
        dataset.set_epoch(epoch)
    return dataset


def _call_source(function: Callable[[], Any], name: str) -> Iterable[Row]:
    rows = function()
    if not isinstance(rows, Iterable):
        raise ConfigError(f"{name} returned {type(rows).__name__}; it must return an iterable of dicts")
    return rows
