"""Which version a follower uses, and where it puts the next: the shelf, and the ring of buffers that it orders."""

from __future__ import annotations

import pytest
import torch

from corrente.errors import SyncError
from corrente.sync.base import InPlace, OnDisk, Update
from corrente.sync.lagged import VersionRing
from corrente.sync.layout import Slab, arrange
from corrente.sync.ring import Ring


@pytest.mark.parametrize("lag", [1, 2, 5])
def test_version_that_is_used_is_lag_behind_and_its_slot_is_never_filled(lag: int):
    shelf, where = VersionRing(lag), dict[int, int]()
    assert shelf.used is None
    for version in range(20):
        spare = shelf.spare
        assert spare < lag + 2
        assert shelf.used is None or spare != shelf.used.slot
        where[spare] = version
        used = shelf.put(version)
        assert used.version == max(0, version - lag)
        assert where[used.slot] == used.version
        assert shelf.used == used


def test_missed_versions_make_the_follower_older_and_never_younger():
    shelf = VersionRing(2)
    got = [shelf.put(version).version for version in (7, 8, 10, 11, 14, 15, 16, 17)]
    assert got == [7, 7, 8, 8, 11, 11, 14, 15]
    assert shelf.put(17).version == 15  # the same again


def test_lag_below_one_is_refused():
    with pytest.raises(SyncError, match="it must be at least 1"):
        VersionRing(0)


LAYOUT = arrange([Slab(name="w", shape=(4,), dtype="float32", offset=0, sources=("w",))])


def test_ring_copies_what_the_learner_will_overwrite():
    shared = [torch.zeros(LAYOUT.nbytes, dtype=torch.uint8) for _ in range(2)]
    ring = Ring(LAYOUT, lag=1, shared=shared)
    assert len(ring.slots) == 3
    for version in range(6):
        shared[version % 2].fill_(version + 1)
        ring.receive(InPlace(version=version, slot=version % 2, nbytes=LAYOUT.nbytes))
        used = ring.take_up(Update(version=version, slot=version % 2))
        assert used.version == max(0, version - 1)
        assert set(ring.slots[used.slot].tolist()) == {used.version + 1}


def test_ring_takes_up_only_what_it_received_whole():
    ring = Ring(LAYOUT, lag=1, shared=[torch.zeros(LAYOUT.nbytes, dtype=torch.uint8)] * 2)
    with pytest.raises(SyncError, match="version 3 was not received"):
        ring.take_up(Update(version=3, slot=0))
    with pytest.raises(SyncError, match="takes whole versions"):
        ring.receive(InPlace(version=4, slot=0, nbytes=1, base=3))
    with pytest.raises(SyncError, match="holds no complete version"):
        ring.receive(OnDisk(version=4, slot=0, nbytes=1, path="/nowhere"))
    with pytest.raises(SyncError, match="version 4 was not received"):
        ring.take_up(Update(version=4, slot=0))
