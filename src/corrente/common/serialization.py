"""Our data as msgpack: typed structs out and in, numpy arrays as (dtype, shape, bytes). Nothing is unpickled.

Used for checkpoints and between processes. An array travels as an extension value: one byte for the dtype, one for the number of
dimensions, eight per dimension, then the elements, little-endian, in C order. It arrives with the dtype that the field declares
(``NDArray[np.float32]``) or is refused; a field declared as plain ``np.ndarray``, or as anything, takes any dtype listed here.
"""

from __future__ import annotations

import math
import struct
from typing import Any, TypeVar, get_args, get_origin

import msgspec
import numpy as np

T = TypeVar("T")

_ARRAY = 1
"""Code of the extension value."""
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
    return _encoder.encode(value)


def decode(data: bytes | bytearray | memoryview | msgspec.Raw, kind: type[T] | Any) -> T:
    """Inverse of ``encode``; msgspec.ValidationError, or another ValueError, where the data is not a ``kind``."""
    return msgspec.msgpack.decode(data, type=kind, dec_hook=_decode_foreign, ext_hook=_decode_extension)


def to_plain(value: Any) -> Any:
    """A value that can be written: numbers of numpy or torch become Python's, what has no plain form its text."""
    item = value.item() if hasattr(value, "item") and not getattr(value, "shape", ()) else value
    try:
        msgspec.msgpack.encode(item)
    except (TypeError, OverflowError):
        return str(item)
    return item
