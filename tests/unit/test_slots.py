"""The transaction of a publish under the virtual clock: deadlines, order, and what is asked of whom."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio
import pytest

from corrente.data.types import ApplyMode
from corrente.errors import SyncError
from corrente.sync.base import Exported, InPlace, Offer, Order, Update
from corrente.sync.slots import SlotSync
from corrente.testing import run_virtual


class Ends:
    """A learner and an engine that take their time, and a diary of what they were asked."""

    def __init__(self) -> None:
        self.diary: list[str] = []
        self.fetch_s = self.reserve_s = self.export_s = 1.0
        self.engines = 1
        self.orders: list[Order] = []

    async def export(self, order: Order) -> Exported:
        self.orders.append(order)
        self.diary.append(f"export {order.version}")
        await anyio.sleep(self.export_s)
        base = None if order.whole else order.live
        return Exported(offer=InPlace(version=order.version, slot=order.slot, nbytes=7, base=base), copy_s=0.5)

    async def again(self, order: Order) -> Offer:
        self.diary.append(f"again {order.version}")
        await anyio.sleep(self.export_s)
        return InPlace(version=order.version, slot=order.slot, nbytes=7)

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
    body: Callable[[Ends, SlotSync], Awaitable[None]], *, anchor_every: int = 0, deadline_s: float = 10.0
) -> None:
    async def main() -> None:
        ends = Ends()
        await body(ends, SlotSync(engine=ends, sender=ends, anchor_every=anchor_every, deadline_s=deadline_s))

    run_virtual(main)


def test_publish_reserves_exports_receives_and_applies_in_that_order():
    async def body(ends: Ends, sync: SlotSync) -> None:
        ends.engines = 3
        for version in range(2):
            flip = await sync.flip(await sync.stage(version), "recompute")
            assert flip.pause_s == 0.25
        first = ["reserve 0", "export 0", "receive 0", "apply 0 recompute"]
        assert ends.diary == [*first, "reserve 1", "export 1", "receive 1", "apply 1 recompute"]
        assert [order.members for order in ends.orders] == [3, 3]
        assert [order.live for order in ends.orders] == [None, 0]
        stats = sync.stats()
        assert stats["publish/stage_s"] == pytest.approx(2.0)
        assert stats["publish/copy_s"] == 0.5
        assert stats["publish/bytes"] == 7

    _play(body)


def test_transfer_past_its_deadline_has_failed_and_the_next_succeeds():
    async def body(ends: Ends, sync: SlotSync) -> None:
        await sync.flip(await sync.stage(0), "swap")
        ends.fetch_s = 10**6
        began = anyio.current_time()
        with pytest.raises(SyncError, match=r"version 1 was not with every engine within 10 s; sync\.deadline_s"):
            await sync.stage(1)
        assert anyio.current_time() - began == pytest.approx(ends.reserve_s + 10.0)
        ends.fetch_s = 1.0
        await sync.flip(await sync.stage(1), "swap")
        ends.export_s = 10**6
        with pytest.raises(SyncError, match="version 1 was not with the late engine within 10 s"):
            await sync.catch_up(ends)

    _play(body)


def test_waiting_for_a_slot_is_no_part_of_the_deadline_and_keeps_no_late_engine_waiting():
    """Sequences that finish under old weights may take long; an engine that comes meanwhile is served at once."""

    async def body(ends: Ends, sync: SlotSync) -> None:
        await sync.flip(await sync.stage(0), "snapshot")
        ends.reserve_s = 500.0
        late = Ends()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(sync.stage, 1)
            await anyio.sleep(1.0)
            began = anyio.current_time()
            await sync.catch_up(late)
            assert anyio.current_time() - began < 10
        assert late.diary[-2:] == ["receive 0", "apply 0 swap"]
        assert ends.diary[-2:] == ["export 1", "receive 1"]

    _play(body)


def test_transfers_and_late_engines_wait_for_one_another():
    async def body(ends: Ends, sync: SlotSync) -> None:
        await sync.flip(await sync.stage(0), "swap")
        late = Ends()
        late.diary = ends.diary
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(sync.stage, 1)
            await anyio.sleep(ends.reserve_s + 0.5)
            tasks.start_soon(sync.catch_up, late)
        staged = ends.diary.index("receive 1")
        assert ends.diary.index("again 0") > staged

    _play(body)


def test_change_is_asked_for_only_between_anchors_and_after_success():
    async def body(ends: Ends, sync: SlotSync) -> None:
        for version in range(5):
            await sync.flip(await sync.stage(version), "swap")
        assert [order.whole for order in ends.orders] == [True, False, False, True, False]
        await sync.stage(5)
        await sync.flip(await sync.stage(5), "swap")
        await sync.flip(await sync.stage(6), "swap")
        assert [order.whole for order in ends.orders[5:]] == [False, True, False]

    _play(body, anchor_every=3)
