"""Weights through a folder that learner and engines see: the slowest transport, and the one that needs least.

A version is a folder of its own: written aside, flushed to the disk, marked as complete last, and then moved to its place. What
has no marker, or another layout's, or does not sum up, is refused. The folder belongs to one run at a time.

    v00000012-5f3a91c2/   weights.safetensors   every tensor as the engine wants it, or the change from its base (delta.py)
                          commit.json           Commit
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from corrente.config import Disk
from corrente.errors import SyncError
from corrente.sync import delta, digest
from corrente.sync.base import OfferRequest
from corrente.sync.offers import DiskOffer
from corrente.sync.receiver import ReceiveTarget
from corrente.sync.sender import PackedVersion, SenderSetup
from corrente.sync.weight_slots import slab_views

WEIGHTS, COMMIT, LOCK = "weights.safetensors", "commit.json", ".lock"
STAGED = ".staged-"
_VERSION = re.compile(rf"({re.escape(STAGED)})?v\d{{8,}}-[0-9a-f]{{8}}")
"""What is cleared away when a run begins; a folder may hold other things as well."""


class Commit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Says that a folder is whole. ``digest`` is that of the version, after the change where it is one; ``nbytes`` the size of
    the file beside it."""

    version: int
    base: int | None
    digest: str
    nbytes: int


class DiskSender:
    """The learner's half. SyncError when another run holds the folder."""

    device = "cpu"

    def __init__(self, section: Disk, setup: SenderSetup) -> None:
        self._section, self._layout = section, setup.layout
        self._folder = Path(section.path).absolute() if section.path else setup.folder
        self._written: list[DiskOffer] = []
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._lock = _lock(self._folder)
        except OSError as error:
            raise SyncError(f"sync.path: weights cannot be written to {self._folder}: {error.strerror}") from error
        for left in [entry for entry in self._folder.iterdir() if _VERSION.fullmatch(entry.name)]:
            shutil.rmtree(left)

    def offer(
        self, request: OfferRequest, new: PackedVersion, base: PackedVersion | None, *, check: Callable[[], None]
    ) -> DiskOffer:
        """Write the version; the live one, for a late engine, is written whole once and offered again as it is."""
        found = next((o for o in self._written if (o.version, o.base) == (request.version, None)), None)
        if found is None or request.version != request.live:
            found = self._write(request, new, base, check)
            self._written.append(found)
            self._prune(request.live)
        return msgspec.structs.replace(found, slot=request.slot)

    def release(self, slot: int) -> None:
        return

    def close(self) -> None:
        os.close(self._lock)

    def _write(
        self, request: OfferRequest, new: PackedVersion, base: PackedVersion | None, check: Callable[[], None]
    ) -> DiskOffer:
        name = f"v{request.version:08d}-{secrets.token_hex(4)}"
        staged, final = self._folder / f"{STAGED}{name}", self._folder / name
        tensors = dict(slab_views(self._layout, new.bytes))
        if base is not None:
            tensors = delta.encode(self._layout, base.bytes, new.bytes, check=check)
        try:
            staged.mkdir()
            save_file(tensors, staged / WEIGHTS)
            commit = Commit(
                version=request.version,
                base=base.version if base else None,
                digest=digest.of(self._layout, new.bytes, threads=1, check=check),
                nbytes=(staged / WEIGHTS).stat().st_size,
            )
            _flush(staged / WEIGHTS)
            check()
            (staged / COMMIT).write_bytes(msgspec.json.encode(commit))
            _flush(staged / COMMIT)
            _flush(staged)
            staged.rename(final)
            _flush(self._folder)
        except BaseException as error:
            shutil.rmtree(staged, ignore_errors=True)
            if isinstance(error, OSError):
                raise SyncError(f"version {request.version} could not be written to {self._folder}: {error}") from error
            raise
        return DiskOffer(
            version=request.version,
            slot=request.slot,
            nbytes=commit.nbytes,
            base=commit.base,
            path=str(final),
            deadline_s=self._section.deadline_s,
        )

    def _prune(self, live: int | None) -> None:
        """Keep the newest, and what the engines hold."""
        old = [offer for offer in self._written[: -self._section.keep] if offer.version != live]
        self._written = [offer for offer in self._written if offer not in old]
        for offer in old:
            shutil.rmtree(offer.path, ignore_errors=True)


class DiskReceiver:
    """The engine's half."""

    on_host = True

    def fetch(self, offer: DiskOffer, into: ReceiveTarget) -> None:
        commit = _read_commit(Path(offer.path))
        if (commit.version, commit.base) != (offer.version, offer.base):
            raise SyncError(f"{offer.path} holds version {commit.version} on base {commit.base}, not what was offered")
        weights = Path(offer.path) / WEIGHTS
        if weights.stat().st_size != commit.nbytes:
            raise SyncError(f"{weights} has {weights.stat().st_size} bytes; {commit.nbytes} were written")
        if into.base is not None:
            changes = _tensors(weights, into)
            delta.apply(into.layout, changes, into.base, into.target)
        else:
            _read(weights, into)
        into.remaining_s()
        if digest.of(into.layout, into.target) != commit.digest:
            raise SyncError(f"{offer.path} is not what the learner wrote: the checksum is another")

    def close(self) -> None:
        return


def _read(weights: Path, into: ReceiveTarget) -> None:
    """Every tensor of the layout, straight into its place."""
    with safe_open(weights, framework="pt") as file:
        views = slab_views(into.layout, into.target)
        if set(file.keys()) != set(views):
            odd = sorted(set(file.keys()) ^ set(views))
            raise SyncError(f"{weights} is of another model: {odd[0]!r} is in one of the two only")
        for name, view in views.items():
            into.remaining_s()
            tensor = file.get_tensor(name)
            if tensor.shape != view.shape or tensor.dtype != view.dtype:
                raise SyncError(f"{weights} has {name!r} as {tensor.dtype} {tuple(tensor.shape)}; the engine has not")
            view.copy_(tensor)


def _tensors(weights: Path, into: ReceiveTarget) -> dict[str, torch.Tensor]:
    with safe_open(weights, framework="pt") as file:
        found: dict[str, torch.Tensor] = {}
        for name in file.keys():  # noqa: SIM118 (a file is no mapping)
            into.remaining_s()
            found[name] = file.get_tensor(name)
        return found


def _read_commit(folder: Path) -> Commit:
    try:
        return msgspec.json.decode((folder / COMMIT).read_bytes(), type=Commit)
    except OSError as error:
        raise SyncError(f"{folder} holds no complete version: {COMMIT}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise SyncError(f"{folder} holds no complete version: {COMMIT}: {error}") from error


def _lock(folder: Path) -> int:
    """Hold the folder until this process ends. SyncError when another holds it."""
    fd = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        raise SyncError(f"sync.path: {folder} is in use by another run; give this one a folder of its own") from error
    return fd


def _flush(path: Path) -> None:
    """Have the disk hold what was written to a file, or the names in a folder."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
