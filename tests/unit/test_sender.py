"""The learner's half with its two threads: what an export waits for, and how an offer is given up."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from corrente.errors import SyncError
from corrente.sync import sender
from corrente.sync.base import OfferRequest
from corrente.sync.layout import Slab, arrange
from corrente.sync.offers import Offer, SharedOffer
from corrente.sync.sender import PackedVersion, WeightSender
from corrente.sync.weight_slots import allocate_slots

LAYOUT = arrange([Slab(name="w", shape=(4,), dtype="float32", offset=0, sources=("w",))])
PATIENCE_S = 20.0


class Slow:
    """A transport whose offer goes on until it is told to, reading its slots all the while."""

    device = "cpu"

    def __init__(self) -> None:
        self.started, self.done = threading.Event(), threading.Event()
        self.deaf = False
        self.released: list[int] = []
        self.offered: list[int] = []

    def offer(
        self, request: OfferRequest, new: PackedVersion, base: PackedVersion | None, *, check: Callable[[], None]
    ) -> Offer:
        self.offered.append(new.slot)
        before = bytes(new.bytes.numpy())
        self.started.set()
        while not self.done.wait(0.001):
            if not self.deaf:
                check()
            assert bytes(new.bytes.numpy()) == before, "a slot was written while it was read"
        return SharedOffer(version=new.version, slot=request.slot, nbytes=len(before))

    def release(self, slot: int) -> None:
        self.released.append(slot)

    def close(self) -> None:
        return


class Desk:
    """A sender whose version 0 in slot 0 is being offered in another thread, and what came of that."""

    def __init__(self) -> None:
        self.transport = Slow()
        self.sender = WeightSender(layout=LAYOUT, slots=allocate_slots(LAYOUT), transport=self.transport)
        self.outcome: Offer | str = ""
        self.export(0, slot=0)
        self.thread = threading.Thread(target=self._offer)
        self.thread.start()
        assert self.transport.started.wait(PATIENCE_S)

    def export(self, version: int, *, slot: int) -> None:
        self.sender.export(version, {"w": torch.full((4,), float(version))}, slot=slot)

    def _offer(self) -> None:
        try:
            self.outcome = self.sender.offer(OfferRequest(version=0, slot=0))
        except SyncError as error:
            self.outcome = str(error)

    def end(self) -> Offer | str:
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive()
        return self.outcome


@pytest.fixture
def desk() -> Iterator[Desk]:
    made = Desk()
    yield made
    made.transport.done.set()
    made.thread.join(PATIENCE_S)


def test_export_to_another_slot_does_not_wait_for_an_offer(desk: Desk):
    desk.export(1, slot=1)
    assert desk.thread.is_alive()
    desk.transport.done.set()
    assert desk.end() == SharedOffer(version=0, slot=0, nbytes=16)


def test_export_to_a_slot_that_is_read_has_the_offer_given_up_first(desk: Desk):
    desk.export(1, slot=0)
    assert desk.end() == "version 0 was given up while it was offered"
    with pytest.raises(SyncError, match=r"version 0 is not kept any more; the learner has \[1, None\]"):
        desk.sender.offer(OfferRequest(version=0, slot=0))
    assert desk.transport.released == [0, 0]


def test_export_gives_up_on_an_offer_that_does_not_end(desk: Desk, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sender, "RELEASE_S", 0.01)
    desk.transport.deaf = True
    with pytest.raises(SyncError, match="slot 0 is still read by an offer that was given up"):
        desk.export(1, slot=0)
    desk.transport.done.set()
    desk.end()
    desk.export(1, slot=0)


def test_offer_that_is_stopped_ends(desk: Desk):
    desk.sender.stop()
    assert desk.end() == "version 0 was given up while it was offered"


def test_later_offer_takes_the_place_of_an_earlier_one(desk: Desk):
    desk.export(1, slot=1)
    later = threading.Thread(target=lambda: desk.sender.offer(OfferRequest(version=1, slot=1)))
    later.start()
    assert desk.end() == "version 0 was given up while it was offered"
    desk.transport.done.set()
    later.join(PATIENCE_S)
    assert not later.is_alive()


def test_version_that_is_exported_again_to_the_other_slot_is_offered_from_there(desk: Desk):
    """A number may be published again; what is offered is the newer copy."""
    desk.transport.done.set()
    desk.end()
    desk.export(0, slot=1)
    assert desk.sender.offer(OfferRequest(version=0, slot=1, live=0)) == SharedOffer(version=0, slot=1, nbytes=16)
    assert desk.transport.offered == [0, 1]
