"""The handshake between a controller and an engine that nobody launched: the files by which they find each other, and the first
messages.

    RUN_FOLDER/join.sock    a Unix socket, while the run goes on
    RUN_FOLDER/join.token   a secret that the engine has to send; both are readable by their owner alone

The engine sends Hello, with the token; the controller answers Welcome, or Refused with the reason. From then on the engine is
called like a worker (wire.py). Sockets are reached through a descriptor of the folder, because the path of a socket may have
about a hundred bytes.
"""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from corrente.config import RunConfig
from corrente.version import __version__

SOCKET, TOKEN = "join.sock", "join.token"
MODEL_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json")
MAX_HELLO_BYTES = 1 << 20
"""Bound on a Hello: no more is read from a connection that has not shown the token."""


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The engine's first message. ``model``: fingerprint of the model it would serve; empty: the run's own."""

    token: str
    pid: int
    version: str = __version__
    model: str = ""


class Welcome(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The engine may serve. ``name``: the engine's, in messages and metrics. ``config``: the run's."""

    name: str
    config: RunConfig


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The engine may not serve, and ``why``. ``wrong``: the engine's settings are to be changed."""

    why: str
    wrong: bool = False


@contextmanager
def socket_path(folder: Path) -> Iterator[str]:
    """A short path of the socket in ``folder``, for as long as the block lasts."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        short = Path(f"/proc/self/fd/{handle}")
        yield str((short if short.exists() else folder) / SOCKET)
    finally:
        os.close(handle)


def listen(folder: Path, token: str) -> socket.socket:
    """Make a listening socket and a file with ``token`` in ``folder``. Files that an earlier run left there are replaced."""
    remove_files(folder)
    handle = os.open(folder / TOKEN, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(handle, "w") as file:
        file.write(token)
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with socket_path(folder) as path:
            server.bind(path)
        (folder / SOCKET).chmod(0o600)
        server.listen()
        server.setblocking(False)
    except OSError:
        server.close()
        remove_files(folder)
        raise
    return server


def remove_files(folder: Path) -> None:
    """Remove the socket and the token."""
    for name in (SOCKET, TOKEN):
        (folder / name).unlink(missing_ok=True)


def fingerprint(model: Path) -> str:
    """A digest of a model's configuration and tokenizer: of all but its weights."""
    digest = hashlib.blake2b(digest_size=16)
    for name in MODEL_FILES:
        path = model / name
        digest.update(name.encode() + (path.read_bytes() if path.is_file() else b"\0"))
    return digest.hexdigest()
