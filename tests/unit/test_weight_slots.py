"""Weight slots: their number, the memory they share, and the tensors that lie in them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from corrente.errors import PipelineError
from corrente.sync.shared_memory import SharedMemory, map_slots, stride


def test_slots_are_shared_between_mappings_and_apart_from_each_other():
    memory = SharedMemory()
    memory.reserve(1000)
    first, second = map_slots(memory.fd, 1000), map_slots(memory.fd, 1000)
    memory.close()
    first[0][:] = b"\1" * 1000
    first[1][:] = b"\2" * 1000
    assert bytes(second[0]) == b"\1" * 1000
    assert bytes(second[1]) == b"\2" * 1000


@pytest.mark.parametrize(
    ("nbytes", "expected"), [(0, 1 << 21), (1, 1 << 21), (1 << 21, 1 << 21), ((1 << 21) + 1, 1 << 22)]
)
def test_stride_is_whole_large_pages(nbytes: int, expected: int):
    assert stride(nbytes) == expected


def test_memory_has_no_name_and_ends_with_its_last_holder():
    before = set(Path("/dev/shm").iterdir()) if Path("/dev/shm").is_dir() else set()
    memory = SharedMemory()
    memory.reserve(1 << 20)
    fd = memory.fd
    assert os.fstat(fd).st_nlink == 0
    assert (set(Path("/dev/shm").iterdir()) if Path("/dev/shm").is_dir() else set()) == before
    memory.close()
    memory.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_memory_without_memfd_is_a_file_without_a_name(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(os, "memfd_create")
    memory = SharedMemory()
    memory.reserve(10)
    one, two = map_slots(memory.fd, 10), map_slots(memory.fd, 10)
    one[1][0] = 9
    assert two[1][0] == 9
    assert os.fstat(memory.fd).st_nlink == 0
    memory.close()


def test_memory_that_does_not_fit_is_refused_by_size():
    memory = SharedMemory()
    with pytest.raises(PipelineError, match=r"2 weight buffers of \d+ MiB do not fit"):
        memory.reserve(1 << 50)
    memory.close()
