"""Weight slots in memory that two processes share and no process can leak.

The memory has no name: it is an anonymous file, reached only through a descriptor, which children inherit and other processes of
the same user find under /proc while its owner keeps it open. It is gone when the last process that holds it ends, however that
process ends. Its pages are taken when it is reserved, so that a machine without room for it says so at the start and not in the
middle of a run, and they are mapped in one go, so that no publish pays for page faults. No torch here: a mapping is a plain
buffer, and weight_slots.py makes tensors of it.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from corrente.errors import PipelineError, SyncError

_STRIDE = 1 << 21


def stride(nbytes: int) -> int:
    """Distance between slots: ``nbytes`` rounded up to the size of a large page."""
    return max(-(-nbytes // _STRIDE), 1) * _STRIDE


class SharedMemory:
    """The owner's end: a descriptor to hand to children by inheritance, and the size of what is behind it."""

    def __init__(self) -> None:
        self.fd = _anonymous_file()

    @property
    def path(self) -> str:
        """The path by which processes of this user can open it while this one is open; empty where the system has none."""
        path = f"/proc/{os.getpid()}/fd/{self.fd}"
        return path if self.fd >= 0 and Path(path).exists() else ""

    def reserve(self, slot_bytes: int, *, count: int = 2) -> None:
        """Give it room for ``count`` slots, all pages taken. PipelineError when the machine has not that much."""
        size, available = count * stride(slot_bytes), _available_bytes()
        refusal = f"{count} weight buffers of {slot_bytes / 2**20:.0f} MiB do not fit in this machine's memory"
        if available is not None and size > available:
            raise PipelineError(f"{refusal}: {available / 2**20:.0f} MiB are available")
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self.fd, 0, size)
            else:
                os.ftruncate(self.fd, size)
        except OSError as error:
            raise PipelineError(f"{refusal}: {error.strerror}") from error

    def close(self) -> None:
        """Let go of it; processes that mapped it keep it. Twice is as good as once."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def map_slots(fd: int, slot_bytes: int, *, count: int = 2) -> Sequence[memoryview]:
    """All slots behind an inherited descriptor, mapped and faulted in; writable, shared, of ``slot_bytes`` each."""
    step = stride(slot_bytes)
    flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
    whole = memoryview(mmap.mmap(fd, count * step, flags=flags))
    return tuple(whole[at * step : at * step + slot_bytes] for at in range(count))


def map_path(path: str, slot_bytes: int, *, count: int = 2) -> Sequence[memoryview]:
    """All slots of the memory that ``SharedMemory.path`` names. SyncError when it is gone, or too small."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise SyncError(f"the weights at {path} cannot be opened: {error.strerror}; has their run ended?") from error
    try:
        size = os.fstat(fd).st_size
        if size < count * stride(slot_bytes):
            raise SyncError(f"{count} slots of {slot_bytes} bytes do not fit in the {size} bytes at {path}")
        return map_slots(fd, slot_bytes, count=count)
    finally:
        os.close(fd)


def _available_bytes() -> int | None:
    """The bytes that the kernel can still give; None if it does not say. Asking for more would have it kill processes."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("corrente-weights", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as file:
        return os.dup(file.fileno())
