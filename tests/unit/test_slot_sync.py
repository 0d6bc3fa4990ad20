"""The transaction of a publish under the virtual clock: deadlines, order, and what is asked of whom."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio
import pytest

from corrente.data.types import ApplyMode
from corrente.errors import SyncError
from corrente.sync.base import OfferRequest, Update, stage
from corrente.sync.offers import Offer, SharedOffer
from corrente.sync.slot_sync import SlotSync
from corrente.testing import run_virtual


class Ends:
    """A learner and an engine that take their time, and a diary of what they were asked."""

    def __init__(self) -> None:
        self.diary: list[str] = []
        self.fetch_s = self.reserve_s = self.export_s = self.offer_s = 1.0
        self.engines = 1
        self.requests: list[OfferRequest] = []

    async def export(self, version: int, *, slot: int) -> float:
        self.diary.append(f"export {version} to {slot}")
        await anyio.sleep(self.export_s)
        return 0.5

    async def offer(self, request: OfferRequest) -> Offer:
        self.requests.append(request)
        self.diary.append(f"offer {request.version}")
        await anyio.sleep(self.offer_s)
        base = None if request.whole else request.live
        return SharedOffer(version=request.version, slot=request.slot, nbytes=7, base=base)

    async def reserve(self, slot: int) -> None:
        self.diary.append(f"reserve {slot}")
        await anyio.sleep(self.reserve_s)

    async def receive(self, offer: Offer) -> None:
        self.diary.append(f"receive {offer.version}")
        await anyio.sleep(self.fetch_s)

    async def apply(self, update: Update, mode: ApplyMode) -> float:
        self.diary.append(f"apply {update.version} {mode}")
        await anyio.sleep(0.25)
        return 0.25

    def members(self) -> int:
        return self.engines

    async def held(self) -> int | None:
        return 0


def _play(
    body: Callable[[Ends, SlotSync], Awaitable[None]],
    *,
    shared: bool = False,
    anchor_every: int = 0,
    deadline_s: float = 10.0,
    slots: int = 2,
) -> None:
    async def main() -> None:
        ends = Ends()
        sync = SlotSync(
            engine=ends, sender=ends, shared=shared, anchor_every=anchor_every, deadline_s=deadline_s, slots=slots
        )
        await body(ends, sync)

    run_virtual(main)


def test_publish_exports_reserves_offers_receives_and_applies_in_that_order():
    async def body(ends: Ends, sync: SlotSync) -> None:
        ends.engines = 3
        for version in range(2):
            flip = await sync.flip(await stage(sync, version), "recompute")
            assert flip.pause_s == 0.25
        first = ["export 0 to 0", "reserve 0", "offer 0", "receive 0", "apply 0 recompute"]
        assert ends.diary == [
            *first,
            "export 1 to 1",
            "reserve 1",
            "offer 1",
            "receive 1",
            "apply 1 recompute",
        ]
        assert [request.members for request in ends.requests] == [3, 3]
        assert [request.live for request in ends.requests] == [None, 0]
        stats = sync.stats()
        assert stats["publish/export_s"] == pytest.approx(1.0)
        assert stats["publish/deliver_s"] == pytest.approx(2.0)
        assert stats["publish/stage_s"] == pytest.approx(3.0)
        assert stats["publish/copy_s"] == 0.5
        assert stats["publish/bytes"] == 7

    _play(body)


def test_export_to_shared_memory_reserves_first_and_its_delivery_does_not_again_unless_it_failed():
    async def body(ends: Ends, sync: SlotSync) -> None:
        await sync.flip(await stage(sync, 0), "swap")
        assert ends.diary == ["reserve 0", "export 0 to 0", "offer 0", "receive 0", "apply 0 swap"]
        stats = sync.stats()
        assert stats["publish/export_s"] == pytest.approx(2.0)  # the learner waits for the slot, too
        assert stats["publish/stage_s"] == pytest.approx(3.0)
        await sync.export(1)
        ends.fetch_s = 10**6
        with pytest.raises(SyncError):
            await sync.deliver(1)
        ends.fetch_s, ends.diary = 1.0, []
        await sync.flip(await sync.deliver(1), "swap")
        assert ends.diary == ["reserve 1", "offer 1", "receive 1", "apply 1 swap"]

    _play(body, shared=True)


def test_export_waits_for_no_transfer():
    """Neither for sequences that sample from the engines' spare slot, nor for a late engine that is being brought up to date."""

    async def body(ends: Ends, sync: SlotSync) -> None:
        await sync.flip(await stage(sync, 0), "snapshot")
        ends.reserve_s = 500.0
        late = Ends()
        late.fetch_s = 9.0
        began = anyio.current_time()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(sync.catch_up, late)
            await anyio.sleep(2.5)
            await sync.export(1)
            assert anyio.current_time() - began == pytest.approx(2.5 + ends.export_s)
            assert "apply 0 swap" not in late.diary

    _play(body, deadline_s=20.0)


def test_transfer_past_its_deadline_has_failed_and_the_next_succeeds():
    async def body(ends: Ends, sync: SlotSync) -> None:
        await sync.flip(await stage(sync, 0), "swap")
        await sync.export(1)
        ends.fetch_s = 10**6
        began = anyio.current_time()
        with pytest.raises(SyncError, match=r"version 1 was not with every engine within 10 s; sync\.deadline_s"):
            await sync.deliver(1)
        assert anyio.current_time() - began == pytest.approx(ends.reserve_s + 10.0)
        ends.fetch_s = 1.0
        await sync.flip(await sync.deliver(1), "swap")
        ends.offer_s = 10**6
        with pytest.raises(SyncError, match="version 1 was not with the late engine within 10 s"):
            await sync.catch_up(ends)
        ends.export_s = 10**6
        with pytest.raises(SyncError, match="version 2 was not exported within 10 s"):
            await sync.export(2)

    _play(body)


def test_only_what_was_exported_last_is_delivered():
    async def body(ends: Ends, sync: SlotSync) -> None:
        with pytest.raises(SyncError, match="version 0 was to be delivered, but nothing is exported"):
            await sync.deliver(0)
        await sync.export(0)
        with pytest.raises(SyncError, match="version 1 was to be delivered, but version 0 is exported"):
            await sync.deliver(1)
        await sync.flip(await sync.deliver(0), "swap")
        with pytest.raises(SyncError, match="version 0 was to be delivered, but nothing is exported"):
            await sync.deliver(0)

    _play(body)


def test_waiting_for_a_slot_is_no_part_of_the_deadline_and_keeps_no_late_engine_waiting():
    """Sequences that finish under old weights may take long; an engine that comes meanwhile is served at once."""

    async def body(ends: Ends, sync: SlotSync) -> None:
        await sync.flip(await stage(sync, 0), "snapshot")
        ends.reserve_s = 500.0
        late = Ends()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(stage, sync, 1)
            await anyio.sleep(3.0)
            began = anyio.current_time()
            await sync.catch_up(late)
            assert anyio.current_time() - began < 10
        assert late.diary[-2:] == ["receive 0", "apply 0 swap"]
        assert ends.diary[-2:] == ["offer 1", "receive 1"]

    _play(body)


def test_transfers_and_late_engines_wait_for_one_another():
    async def body(ends: Ends, sync: SlotSync) -> None:
        await sync.flip(await stage(sync, 0), "swap")
        late = Ends()
        late.diary = ends.diary
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(stage, sync, 1)
            await anyio.sleep(ends.export_s + ends.reserve_s + 0.5)
            tasks.start_soon(sync.catch_up, late)
        delivered = ends.diary.index("receive 1")
        assert len(ends.diary) - 1 - ends.diary[::-1].index("offer 0") > delivered

    _play(body)


def test_change_is_asked_for_only_between_anchors_and_after_success():
    async def body(ends: Ends, sync: SlotSync) -> None:
        for version in range(5):
            await sync.flip(await stage(sync, version), "swap")
        assert [request.whole for request in ends.requests] == [True, False, False, True, False]
        await stage(sync, 5)
        await sync.flip(await sync.deliver(5), "swap")
        await sync.flip(await stage(sync, 6), "swap")
        assert [request.whole for request in ends.requests[5:]] == [False, True, False]

    _play(body, anchor_every=3)


@pytest.mark.parametrize("shared", [True, False])
def test_one_slot_is_reserved_although_it_is_live_and_nothing_is_live_until_the_flip(shared: bool):
    async def body(ends: Ends, sync: SlotSync) -> None:
        for version in range(2):
            await sync.flip(await stage(sync, version), "swap")
        assert ends.diary.count("reserve 0") == 2
        update = await stage(sync, 2)
        assert update.slot == 0
        with pytest.raises(SyncError, match="no version is live"):
            await sync.catch_up(Ends())
        with pytest.raises(SyncError, match='mode "snapshot" keeps the old weights'):
            await sync.flip(update, "snapshot")
        await sync.flip(update, "swap")
        assert [request.whole for request in ends.requests] == [True] * 3
        await sync.catch_up(Ends())

    _play(body, shared=shared, anchor_every=5, slots=1)
