"""Our data as msgpack: typed structs out and in, numpy arrays as (dtype, shape, bytes). Nothing is unpickled.

All plain data (``common.plain_data``) arrives as it was, also what msgpack has no form for, or another: integers of more than 64
bits, dates and times, decimal numbers, paths. Text that is not valid Unicode arrives as the nearest that is.

Used for checkpoints and between processes. An array travels as an extension value: one byte for the dtype, one for the number of
dimensions, eight per dimension, then the elements, little-endian, in C order. It arrives with the dtype that the field declares
(``NDArray[np.float32]``) or is refused; a field declared as plain ``np.ndarray``, or as anything, takes any dtype listed here.
"""

from __future__ import annotations

import datetime
import decimal
import math
import operator
import pathlib
import struct
import uuid
from collections.abc import Callable
from typing import Any, TypeVar, get_args, get_origin

import msgspec
import numpy as np

from corrente.common.plain_data import MAX_NESTING, plain_text

T = TypeVar("T")

_ARRAY, _KEPT = 1, 2
"""Codes of the extension values: an array, and a value as "type:text"."""
_MAX_NESTING = 3 * MAX_NESTING
"""Of plain data and the structs around it."""
_NATIVE = frozenset({float, bool, type(None), bytes, np.ndarray})
_FITS = range(-(2**63), 2**64)
"""Integers that msgpack holds."""
_WRITTEN: tuple[tuple[str, type, Callable[[Any], str]], ...] = (
    ("datetime", datetime.datetime, lambda value: value.isoformat()),
    ("date", datetime.date, lambda value: value.isoformat()),
    ("time", datetime.time, lambda value: value.isoformat()),
    ("timedelta", datetime.timedelta, lambda value: str(value // datetime.timedelta(microseconds=1))),
    ("decimal", decimal.Decimal, str),
    ("uuid", uuid.UUID, str),
    ("path", pathlib.PurePath, str),
)
_READ: dict[str, Callable[[str], Any]] = {
    "int": lambda text: int(text, 16),
    "datetime": datetime.datetime.fromisoformat,
    "date": datetime.date.fromisoformat,
    "time": datetime.time.fromisoformat,
    "timedelta": lambda text: datetime.timedelta(microseconds=int(text)),
    "decimal": decimal.Decimal,
    "uuid": uuid.UUID,
    "path": pathlib.Path,
}
_DTYPES = (
    *("int32", "float32", "bool", "int64", "float64", "int16"),
    *("uint8", "int8", "uint16", "uint32", "uint64", "float16"),
)
"""Dtypes that can be encoded, by their number in the format: append, never reorder."""


def _encode_array(value: np.ndarray[Any, Any]) -> msgspec.msgpack.Ext:
    if value.dtype.name not in _DTYPES:
        raise TypeError(f"an array of {value.dtype} cannot be encoded; {', '.join(_DTYPES)} can")
    head = bytes((_DTYPES.index(value.dtype.name), value.ndim)) + struct.pack(f">{value.ndim}Q", *value.shape)
    return msgspec.msgpack.Ext(_ARRAY, head + value.astype(value.dtype.newbyteorder("<"), copy=False).tobytes())


def _encode_foreign(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return _encode_array(value)
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} cannot be encoded")


def _decode_extension(code: int, data: memoryview) -> Any:
    if code == _KEPT:
        kind, _, text = bytes(data).decode("utf-8", "surrogatepass").partition(":")
        return _READ[kind](text)
    if code != _ARRAY or len(data) < 2 or data[0] >= len(_DTYPES) or len(data) < 2 + 8 * data[1]:
        raise ValueError(f"extension value {code} of {len(data)} bytes is not an array")
    dtype, ndim = np.dtype(_DTYPES[data[0]]), data[1]
    shape = struct.unpack(f">{ndim}Q", data[2 : 2 + 8 * ndim])
    raw = data[2 + 8 * ndim :]
    if math.prod(shape) * dtype.itemsize != len(raw):
        raise ValueError(f"array of shape {shape} and dtype {dtype} has {len(raw)} bytes")
    # A copy: it owns its memory, may be written to, and does not keep the whole message alive.
    return np.frombuffer(raw, dtype.newbyteorder("<")).reshape(shape).astype(dtype, copy=True)


def _decode_foreign(kind: Any, value: Any) -> Any:
    """Accept an array where the field's annotation says so."""
    if kind is not np.ndarray and get_origin(kind) is not np.ndarray:
        raise TypeError(f"{kind} cannot be decoded")
    declared: Any = get_args(get_args(kind)[1])[0] if get_args(kind) else Any
    wanted: np.dtype[Any] | None = np.dtype(declared) if declared is not Any and isinstance(declared, type) else None
    if not isinstance(value, np.ndarray) or wanted not in (None, value.dtype):
        given = f"{value.dtype} array" if isinstance(value, np.ndarray) else type(value).__name__
        raise ValueError(f"expected {f'a {wanted}' if wanted else 'an'} array, got {given}")
    return value


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_foreign)


def encode(value: Any) -> bytes:
    """Structs, containers, scalars and numpy arrays to msgpack. TypeError for anything else."""
    try:
        return _encoder.encode(_with_extensions(value))
    except UnicodeEncodeError:
        return _encoder.encode(_with_extensions(value, text=plain_text))


def _with_extensions(value: Any, *, text: Callable[[str], str] | None = None, nesting: int = _MAX_NESTING) -> Any:
    """``value`` with extension values for what msgpack would lose; ``text`` converts strings."""
    kind = type(value)
    if kind is str:
        return text(value) if text else value
    if kind in _NATIVE:
        return value
    if kind is int:
        return value if _FITS.start <= value < _FITS.stop else _extension("int", hex(value))
    if nesting < 1:
        raise TypeError(f"a value nested more than {_MAX_NESTING} deep cannot be encoded")

    def inner(item: Any) -> Any:
        return _with_extensions(item, text=text, nesting=nesting - 1)

    if kind is dict:
        if text:
            return {text(key) if isinstance(key, str) else key: inner(item) for key, item in value.items()}
        changed = {name: new for name, item in value.items() if (new := inner(item)) is not item}
        return {**value, **changed} if changed else value
    if kind in (list, tuple):
        items = [inner(item) for item in value]
        return value if all(map(operator.is_, items, value)) else items
    if isinstance(value, msgspec.Struct):
        given = {name: getattr(value, name) for name in value.__struct_fields__}
        changed = {name: new for name, item in given.items() if (new := inner(item)) is not item}
        return msgspec.structs.replace(value, **changed) if changed else value
    return next((_extension(name, write(value)) for name, of, write in _WRITTEN if isinstance(value, of)), value)


def _extension(kind: str, text: str) -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(_KEPT, f"{kind}:{text}".encode("utf-8", "surrogatepass"))


def decode(data: bytes | bytearray | memoryview | msgspec.Raw, kind: type[T] | Any) -> T:
    """Inverse of ``encode``; msgspec.ValidationError, or another ValueError, where the data is not a ``kind``."""
    return msgspec.msgpack.decode(data, type=kind, dec_hook=_decode_foreign, ext_hook=_decode_extension)
