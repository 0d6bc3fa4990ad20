"""Our data as msgpack: typed structs out and in, numpy arrays as (dtype, shape, bytes). Nothing is unpickled.

Used for checkpoints and between processes.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
import numpy as np

T = TypeVar("T")

_KINDS = "biuf"
"""Array dtypes that may cross: booleans, integers, floats."""


class _Array(msgspec.Struct, frozen=True, array_like=True):
    dtype: str
    shape: tuple[int, ...]
    data: bytes


def _enc(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in _KINDS:
            raise TypeError(f"an array of {value.dtype} cannot be encoded")
        return _Array(value.dtype.str, value.shape, np.ascontiguousarray(value).tobytes())
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} cannot be encoded")


def _dec(kind: type, value: Any) -> Any:
    if kind is np.ndarray or getattr(kind, "__origin__", None) is np.ndarray:
        array = msgspec.convert(value, _Array)
        dtype = np.dtype(array.dtype)
        if dtype.kind not in _KINDS:
            raise ValueError(f"an array of {dtype} cannot be decoded")
        return np.frombuffer(bytearray(array.data), dtype).reshape(array.shape)
    raise TypeError(f"{kind} cannot be decoded")


_encoder = msgspec.msgpack.Encoder(enc_hook=_enc)


def encode(value: Any) -> bytes:
    """Structs, containers, scalars and numpy arrays to msgpack. TypeError for anything else."""
    return _encoder.encode(value)


def decode(data: bytes | bytearray | memoryview, kind: type[T]) -> T:
    """Back to ``kind``; msgspec.ValidationError where the data does not fit it."""
    return msgspec.msgpack.decode(data, type=kind, dec_hook=_dec)


def to_plain(value: Any) -> Any:
    """A value that can be written: numbers of numpy or torch become Python's, what has no plain form its text."""
    item = value.item() if hasattr(value, "item") and not getattr(value, "shape", ()) else value
    try:
        msgspec.msgpack.encode(item)
    except (TypeError, OverflowError):
        return str(item)
    return item
