"""Converts what users and models bring to plain data: values that a checkpoint, another process and a JSON file can hold.

Plain are None, bool, int of any size, float, str, bytes, lists, dicts, and values of the types in ``KEPT``. Arrays, tensors,
series and sets become lists, scalars of numpy, torch and pandas become Python's, enumerations their values, and dataclasses and
structs dicts. Text is valid Unicode: the two halves of a surrogate pair become one character, a half alone becomes U+FFFD.
"""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import pathlib
import uuid
from collections.abc import Mapping, Set
from typing import Any

import msgspec
import numpy as np

MAX_NESTING = 100
"""Lists and dicts within one another that a value may have: Python's own limit, in encoders and templates, is a multiple."""
KEPT = (
    datetime.datetime,
    datetime.date,
    datetime.time,
    datetime.timedelta,
    decimal.Decimal,
    uuid.UUID,
    pathlib.PurePath,
)
"""Types whose values stay what they are."""


def plain_text(text: str) -> str:
    """The text as valid Unicode; see the module."""
    try:
        text.encode()
    except UnicodeEncodeError:
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text if type(text) is str else str.__str__(text)


def plain_data(value: Any, *, nesting: int = MAX_NESTING) -> Any:
    """The value as plain data. TypeError where it has no plain form, and where more than ``nesting`` lists are in one another."""
    if value is None or isinstance(value, bool | bytes):
        return value
    if isinstance(value, enum.Enum):
        return plain_data(value.value, nesting=nesting)
    if isinstance(value, str):
        return plain_text(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, KEPT):
        return _plain_value(value)
    if isinstance(value, bytearray | memoryview):
        return bytes(value)
    if nesting < 1:
        raise TypeError(f"it is nested more than {MAX_NESTING} deep")
    return _plain_container(value, nesting - 1)


def _plain_container(value: Any, nesting: int) -> Any:
    if isinstance(value, Mapping):
        return {_plain_key(key): plain_data(item, nesting=nesting) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_data(item, nesting=nesting) for item in value]
    if isinstance(value, Set):
        return sorted((plain_data(item, nesting=nesting) for item in value), key=repr)
    if isinstance(value, msgspec.Struct):
        return plain_data(msgspec.structs.asdict(value), nesting=nesting)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return plain_data(fields, nesting=nesting)
    return _plain_foreign(value, nesting)


def _plain_foreign(value: Any, nesting: int) -> Any:
    """A value of numpy, torch, pandas, pyarrow or a library like them, by the methods they share: none is imported."""
    if isinstance(value, np.datetime64 | np.timedelta64) or _has_times(value):
        value = value.astype(f"{value.dtype.kind}8[us]")  # finer ones are numbers for Python
    if type(value).__name__ in ("NAType", "NaTType"):
        return None
    if hasattr(value, "iloc") and hasattr(value, "columns"):
        return plain_data(value.to_dict("records"), nesting=nesting)
    for convert in ("tolist", "to_pylist", "as_py"):
        if callable(getattr(value, convert, None)):
            if convert == "tolist" and hasattr(value, "detach"):
                value = value.detach()
            found = getattr(value, convert)()
            if found is not value:
                return plain_data(found, nesting=nesting)
    raise TypeError(f"{type(value).__name__} has no plain form")


def _has_times(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype.kind in "mM"


def _plain_value(value: Any) -> Any:
    """A value of a type in KEPT, without what a subclass adds; None for a missing time of pandas."""
    if value != value:
        return None if isinstance(value, datetime.date | datetime.timedelta) else value
    for convert in ("to_pydatetime", "to_pytimedelta"):
        if hasattr(value, convert):
            return getattr(value.floor("us"), convert)()
    return value


def _plain_key(key: Any) -> Any:
    if key is None or isinstance(key, bool):
        return str(key)
    if isinstance(key, int | np.integer):
        return int(key) if -(2**63) <= key < 2**63 else str(key)
    return plain_text(key if isinstance(key, str) else str(key))


def to_plain(value: Any) -> Any:
    """The value as plain data; as its text where it has no plain form. Never raises."""
    try:
        return plain_data(value)
    except Exception:  # a value of any type may raise anything when it is looked at
        return safe_text(value)


def safe_text(value: Any) -> str:
    """``str(value)`` as valid Unicode; the name of its type where that raises."""
    try:
        return plain_text(str(value))
    except Exception:
        return f"<{type(value).__name__}>"


def json_plain(value: Any) -> Any:
    """The value as JSON can hold it; never raises. Keys are text, and bytes and values of KEPT are theirs."""
    return _json_plain(to_plain(value))


def _json_plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _json_plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_json_plain(item) for item in value]
    if isinstance(value, datetime.datetime | datetime.date | datetime.time):
        return value.isoformat()
    if value is None or isinstance(value, bool | float | str):
        return value
    if isinstance(value, int):
        return value if abs(value) < 10**4000 else safe_text(hex(value))  # Python prints no longer ones
    return safe_text(value)
