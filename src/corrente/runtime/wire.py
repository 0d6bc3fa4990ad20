"""What a controller and its workers say to each other, and how it is laid on a byte stream.

A frame is a length (8 bytes, big-endian) and one msgpack value, as large as memory allows. Calls carry a number, replies the
same number, so that many are open at once and answers may overtake one another. Arrays travel as an extension value (dtype,
shape, raw bytes) and arrive with the dtype their field declares or not at all. Every message is a typed struct: nothing is
unpickled, and what does not fit the type is refused. Both ends run the same version of corrente on the same host: there is no
negotiation.
"""

from __future__ import annotations

import math
import struct
from typing import Any, TypeVar, get_args, get_origin

import msgspec
import numpy as np

from corrente import errors
from corrente.config import RunConfig
from corrente.data.types import ApplyMode, Batch, Request, Tokens
from corrente.sync.base import OfferRequest, Update
from corrente.sync.layout import Layout
from corrente.sync.offers import Offer

MAX_FRAME_BYTES = 1 << 40
"""No batch comes near it, with experts, kept sets and lessons of every token: a length above it is noise."""
CHUNK_BYTES = 1 << 18
_HEADER = struct.Struct(">Q")
_ARRAY = 1
_DTYPES = ("int32", "float32", "bool", "int64", "float64", "int16")

T = TypeVar("T")


class _Message(msgspec.Struct, frozen=True, kw_only=True, eq=False, tag=True):
    pass


# ---- what a controller asks -------------------------------------------------------------------------------------------------


class Start(_Message, frozen=True, kw_only=True):
    """Build the core: ``factory`` ("module:function") is called with ``config``, and that of an engine with its ``index``, its
    turn where there are several GPUs, too. An engine answers with its Layout."""

    factory: str
    config: RunConfig
    index: int = 0


class Attach(_Message, frozen=True, kw_only=True):
    """Make ready ``slots`` weight buffers for ``layout``: those in the memory inherited as ``fd`` or to be opened at ``path``, or
    buffers of the worker's own where neither is given."""

    layout: Layout
    fd: int | None = None
    path: str = ""
    slots: int = 2


class Generate(_Message, frozen=True, kw_only=True):
    """Answered with a Completion."""

    request: Request


class Score(_Message, frozen=True, kw_only=True):
    """Answered with Scores."""

    tokens: Tokens
    top: int = 0


class Abort(_Message, frozen=True, kw_only=True):
    """End requests by their own ids; their Generate calls are answered with what they have."""

    ids: tuple[str, ...]


class Partials(_Message, frozen=True, kw_only=True):
    """Answered with what the live ones among these requests have so far, by id."""

    ids: tuple[str, ...]


class Reserve(_Message, frozen=True, kw_only=True):
    """Answered once no live sequence samples from the slot."""

    slot: int


class Receive(_Message, frozen=True, kw_only=True):
    """Answered when what is offered lies in its slot. Decoding goes on meanwhile."""

    offer: Offer


class Apply(_Message, frozen=True, kw_only=True):
    """Flip the engine to a staged update; answered with the pause in seconds."""

    update: Update
    mode: ApplyMode


class Stats(_Message, frozen=True, kw_only=True):
    """Answered with EngineStats."""


class StepRpc(_Message, frozen=True, kw_only=True):
    """One optimizer step; answered with metrics."""

    batch: Batch


class Export(_Message, frozen=True, kw_only=True):
    """Copy the present weights into a slot; answered with the seconds that took."""

    version: int
    slot: int


class OfferWeights(_Message, frozen=True, kw_only=True):
    """Offer a version that was exported; answered with an Offer, beside the step that may be going on."""

    request: OfferRequest


class Save(_Message, frozen=True, kw_only=True):
    path: str


class Load(_Message, frozen=True, kw_only=True):
    path: str


class CancelRpc(_Message, frozen=True, kw_only=True):
    """Nobody waits for ``call`` any more: a generation ends, a flip is taken back. Has no answer."""

    call: int


class Leave(_Message, frozen=True, kw_only=True):
    """Said by an engine that joined, to itself: it wants to leave, and says so to the controller in an answer to call 0."""


class Dismiss(_Message, frozen=True, kw_only=True):
    """An engine that joined is not wanted: it ends, saying why. Has no answer."""

    why: str


Asked = Start | Attach | Generate | Score | Abort | Partials | Stats | Reserve | Receive | Apply
Body = Asked | StepRpc | Export | OfferWeights | Save | Load | CancelRpc | Leave | Dismiss


class Rpc(msgspec.Struct, frozen=True, eq=False):
    id: int
    body: Body


# ---- what a worker answers --------------------------------------------------------------------------------------------------


class Reply(_Message, frozen=True, kw_only=True):
    """``value`` is encoded; the caller knows its type."""

    id: int
    value: msgspec.Raw


class Failed(_Message, frozen=True, kw_only=True):
    """The call raised: the class's name and its message."""

    id: int
    error: str
    message: str


class Going(_Message, frozen=True, kw_only=True):
    """The call is being worked at, and has come a piece further. Its answer follows."""

    id: int


Answer = Reply | Failed | Going


def failure(call: int, error: Exception, *, worker: str) -> Failed:
    """``error`` as it crosses the wire. Foreign exceptions are told apart by name and worker, in the message."""
    name = type(error).__name__
    if isinstance(error, errors.CorrenteError):
        return Failed(id=call, error=name, message=str(error))
    return Failed(id=call, error=name, message=f"{worker} failed: {name}: {error}")


def rebuild(failed: Failed) -> errors.CorrenteError:
    """The exception a caller sees: corrente's own class of that name, else PipelineError."""
    kind = getattr(errors, failed.error, None)
    if isinstance(kind, type) and issubclass(kind, errors.CorrenteError):
        return kind(failed.message)
    return errors.PipelineError(failed.message)


# ---- bytes ------------------------------------------------------------------------------------------------------------------


def _encode_hook(value: Any) -> msgspec.msgpack.Ext:
    if isinstance(value, np.ndarray) and value.dtype.name in _DTYPES:
        head = bytes((_DTYPES.index(value.dtype.name), value.ndim)) + struct.pack(f">{value.ndim}Q", *value.shape)
        return msgspec.msgpack.Ext(_ARRAY, head + value.tobytes())
    raise TypeError(f"{type(value).__name__} does not cross the wire")


def _decode_extension(code: int, data: memoryview) -> Any:
    if code != _ARRAY or len(data) < 2 or data[0] >= len(_DTYPES) or len(data) < 2 + 8 * data[1]:
        raise ValueError(f"extension value {code} of {len(data)} bytes is not an array")
    dtype, ndim = np.dtype(_DTYPES[data[0]]), data[1]
    shape = struct.unpack(f">{ndim}Q", data[2 : 2 + 8 * ndim])
    raw = data[2 + 8 * ndim :]
    if math.prod(shape) * dtype.itemsize != len(raw):
        raise ValueError(f"array of shape {shape} and dtype {dtype} has {len(raw)} bytes")
    return np.frombuffer(raw, dtype).reshape(shape).copy()


def _decode_hook(kind: Any, value: Any) -> Any:
    """Accept an array where the field's annotation, NDArray[dtype], says so."""
    if get_origin(kind) is not np.ndarray:
        raise TypeError(f"{kind} does not cross the wire")
    wanted = np.dtype(get_args(get_args(kind)[1])[0])
    if not isinstance(value, np.ndarray) or value.dtype != wanted:
        given = f"{value.dtype} array" if isinstance(value, np.ndarray) else type(value).__name__
        raise ValueError(f"expected a {wanted} array, got {given}")
    return value


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_hook)


def encode(value: Any) -> bytes:
    """One value without its frame. TypeError for what has no place on the wire."""
    return _encoder.encode(value)


def decode(data: bytes | memoryview | msgspec.Raw, kind: type[T] | Any) -> T:
    """Inverse of ``encode``; msgspec.ValidationError when the bytes are not a ``kind``."""
    return msgspec.msgpack.decode(data, type=kind, dec_hook=_decode_hook, ext_hook=_decode_extension)


def reply(call: int, value: Any) -> Reply:
    return Reply(id=call, value=msgspec.Raw(encode(value)))


def frame(message: msgspec.Struct) -> bytes:
    """A message as it goes on the stream."""
    body = encode(message)
    return _HEADER.pack(len(body)) + body


class Frames:
    """Cuts a byte stream into frames: feed it what arrived, take what is complete."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes | memoryview) -> list[bytes]:
        """Bodies of the frames that ``data`` completed. ValueError for a length no one sends."""
        self._data += data
        bodies: list[bytes] = []
        at = 0
        while len(self._data) - at >= _HEADER.size:
            (length,) = _HEADER.unpack_from(self._data, at)
            if length > MAX_FRAME_BYTES:
                raise ValueError(f"frame of {length} bytes announced; at most {MAX_FRAME_BYTES} are sent")
            stop = at + _HEADER.size + length
            if stop > len(self._data):
                break
            bodies.append(bytes(self._data[at + _HEADER.size : stop]))
            at = stop
        del self._data[:at]
        return bodies
