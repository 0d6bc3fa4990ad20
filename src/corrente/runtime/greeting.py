"""How an engine that nobody launched and a controller find and trust each other: the files, and what is said first.

    RUN_FOLDER/join.sock    a Unix socket, while the run goes on
    RUN_FOLDER/join.token   what the engine must know; both are readable by their owner alone

The engine says Hello, with the token; the controller answers Welcome, or Refused with the reason. From then on the engine is
called like a child (wire.py). Sockets are reached through a descriptor of the folder: their own paths may hold about a hundred
bytes.
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
MOST_BYTES = 1 << 20
"""Of a greeting: who is not known yet is not listened to for long."""


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """``model``: fingerprint of the model the engine would serve; empty: the run's own."""

    token: str
    pid: int
    version: str = __version__
    model: str = ""


class Welcome(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The name the engine goes by, and the config of the run."""

    name: str
    config: RunConfig


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """``wrong``: it is the engine's settings that are to be changed."""

    why: str
    wrong: bool = False


@contextmanager
def address(folder: Path) -> Iterator[str]:
    """A short path of the socket in ``folder``, for as long as the block lasts."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        short = Path(f"/proc/self/fd/{handle}")
        yield str((short if short.exists() else folder) / SOCKET)
    finally:
        os.close(handle)


def listen(folder: Path, token: str) -> socket.socket:
    """A listening socket in ``folder``, and ``token`` beside it. What an earlier run left there is replaced."""
    forget(folder)
    handle = os.open(folder / TOKEN, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(handle, "w") as file:
        file.write(token)
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with address(folder) as path:
            server.bind(path)
        (folder / SOCKET).chmod(0o600)
        server.listen()
        server.setblocking(False)
    except OSError:
        server.close()
        forget(folder)
        raise
    return server


def forget(folder: Path) -> None:
    """Remove both files."""
    for name in (SOCKET, TOKEN):
        (folder / name).unlink(missing_ok=True)


def fingerprint(model: Path) -> str:
    """Of what besides the weights makes a model: its configuration and its tokenizer."""
    digest = hashlib.blake2b(digest_size=16)
    for name in MODEL_FILES:
        path = model / name
        digest.update(name.encode() + (path.read_bytes() if path.is_file() else b"\0"))
    return digest.hexdigest()
