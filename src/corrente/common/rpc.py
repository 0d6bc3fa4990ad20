"""The messages of a remote procedure call, and how they are laid on a byte stream.

A frame is a length (8 bytes, big-endian) and one msgpack value (serialization.py), as large as memory allows. Calls carry a
number and answers the same number, so many are open at once and answers may overtake one another. Every message is a typed
struct: nothing is unpickled, and what does not fit the type is refused. A worker's role declares the messages it takes
(rpc_server.Role.requests). Both ends run the same version of corrente: there is no negotiation.

rpc_client.py is the end that calls, rpc_server.py the end that answers.
"""

from __future__ import annotations

import struct
from typing import Any, Generic, TypeVar

import msgspec

from corrente import errors
from corrente.common.serialization import encode

MAX_FRAME_BYTES = 1 << 40
"""No batch comes near it, with experts, supports and teachers' log-probs of every token: a length above it is noise."""
CHUNK_BYTES = 1 << 18
"""Read from a socket at once."""
_HEADER = struct.Struct(">Q")

B = TypeVar("B")


class RpcCall(msgspec.Struct, Generic[B], frozen=True, eq=False):
    """``id``: answers carry it; 0 where no answer is expected. ``body``: one of the messages that the worker's role takes."""

    id: int
    body: B


class BuildRole(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The first call to a worker: build the object at the dotted path ``path``, called with ``arguments``. Answered with None."""

    path: str
    arguments: dict[str, Any] = {}


class CancelCall(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Nobody waits for ``call`` any more. Has no answer. Part of every role's messages."""

    call: int


class RpcReply(msgspec.Struct, frozen=True, kw_only=True, eq=False, tag=True):
    """``value`` is encoded; the caller knows its type."""

    id: int
    value: msgspec.Raw


class RpcFailure(msgspec.Struct, frozen=True, kw_only=True, eq=False, tag=True):
    """The call raised: the class's name and its message."""

    id: int
    error: str
    message: str


class RpcProgress(msgspec.Struct, frozen=True, kw_only=True, eq=False, tag=True):
    """The call is being worked on, and has come a piece further. Its answer follows."""

    id: int


RpcAnswer = RpcReply | RpcFailure | RpcProgress


def reply(call: int, value: Any) -> RpcReply:
    """The answer ``value``. TypeError for what cannot be encoded."""
    return RpcReply(id=call, value=msgspec.Raw(encode(value)))


def failure(call: int, error: Exception, *, worker: str) -> RpcFailure:
    """``error`` as it crosses processes. Exceptions of others are told apart by class and worker, in the message."""
    name = type(error).__name__
    if isinstance(error, errors.CorrenteError):
        return RpcFailure(id=call, error=name, message=str(error))
    return RpcFailure(id=call, error=name, message=f"{worker} failed: {name}: {error}")


def rebuild(failed: RpcFailure) -> errors.CorrenteError:
    """The exception a caller sees: corrente's own class of that name, else PipelineError."""
    kind = getattr(errors, failed.error, None)
    if isinstance(kind, type) and issubclass(kind, errors.CorrenteError):
        return kind(failed.message)
    return errors.PipelineError(failed.message)


def frame(message: msgspec.Struct) -> bytes:
    """A message as it goes on the stream. TypeError for what cannot be encoded."""
    body = encode(message)
    return _HEADER.pack(len(body)) + body


class FrameReader:
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
