"""Which version a follower uses, and where it puts the next: the order of slots, and the memory in that order."""

from __future__ import annotations

import pytest
import torch

from corrente.errors import SyncError
from corrente.sync.base import Update
from corrente.sync.lagged import VersionRing
from corrente.sync.lagged_receiver import LaggedReceiver
from corrente.sync.layout import Slab, arrange
from corrente.sync.offers import DiskOffer, SharedOffer


@pytest.mark.parametrize("lag", [1, 2, 5])
def test_version_that_is_used_is_lag_behind_and_its_slot_is_never_filled(lag: int):
    ring, where = VersionRing(lag), dict[int, int]()
    assert ring.used is None
    for version in range(20):
        spare = ring.spare
        assert spare < lag + 2
        assert ring.used is None or spare != ring.used.slot
        where[spare] = version
        used = ring.put(version)
        assert used.version == max(0, version - lag)
        assert where[used.slot] == used.version
        assert ring.used == used


def test_missed_versions_make_the_follower_older_and_never_younger():
    ring = VersionRing(2)
    got = [ring.put(version).version for version in (7, 8, 10, 11, 14, 15, 16, 17)]
    assert got == [7, 7, 8, 8, 11, 11, 14, 15]
    assert ring.put(17).version == 15  # the same again


def test_lag_below_one_is_refused():
    with pytest.raises(SyncError, match="it must be at least 1"):
        VersionRing(0)


LAYOUT = arrange([Slab(name="w", shape=(4,), dtype="float32", offset=0, sources=("w",))])


def test_lagged_receiver_copies_what_the_learner_will_overwrite():
    shared = [torch.zeros(LAYOUT.nbytes, dtype=torch.uint8) for _ in range(2)]
    receiver = LaggedReceiver(LAYOUT, lag=1, shared=shared)
    assert len(receiver.slots) == 3
    for version in range(6):
        shared[version % 2].fill_(version + 1)
        receiver.receive(SharedOffer(version=version, slot=version % 2, nbytes=LAYOUT.nbytes))
        used = receiver.use(Update(version=version, slot=version % 2))
        assert used.version == max(0, version - 1)
        assert set(receiver.slots[used.slot].tolist()) == {used.version + 1}


def test_lagged_receiver_uses_only_what_it_received_whole():
    receiver = LaggedReceiver(LAYOUT, lag=1, shared=[torch.zeros(LAYOUT.nbytes, dtype=torch.uint8)] * 2)
    with pytest.raises(SyncError, match="version 3 was not received"):
        receiver.use(Update(version=3, slot=0))
    with pytest.raises(SyncError, match="takes whole versions"):
        receiver.receive(SharedOffer(version=4, slot=0, nbytes=1, base=3))
    with pytest.raises(SyncError, match="holds no complete version"):
        receiver.receive(DiskOffer(version=4, slot=0, nbytes=1, path="/nowhere"))
    with pytest.raises(SyncError, match="version 4 was not received"):
        receiver.use(Update(version=4, slot=0))
