"""The transport of one process, held to the contract of every transport, and taken through its failures."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import anyio
import pytest
import torch

from corrente.data.types import ApplyMode
from corrente.errors import SyncError
from corrente.sync.base import Receiver, Update, stage
from corrente.sync.inproc import InprocSync
from corrente.sync.layout import Slab, arrange
from corrente.sync.offers import Offer, SharedOffer
from corrente.sync.weight_slots import allocate_slots
from corrente.testing import SyncCase, check_sync

LAYOUT = arrange([Slab(name="w", shape=(2, 3), dtype="float32", offset=0, sources=("a", "b"))])


class World:
    """A learner's weights, an engine that reads what it was pointed at, and the sync between them."""

    def __init__(self, *, slots: int = 2) -> None:
        self.buffers = allocate_slots(LAYOUT, count=slots)
        self.weights = {"a": torch.zeros(1, 3), "b": torch.zeros(1, 3)}
        self.broken = ""
        self.update = Update(version=-1, slot=0)
        self.paused = False
        self.cancelled_after_flip: anyio.CancelScope | None = None
        self.sync = InprocSync(engine=self, layout=LAYOUT, buffers=self.buffers, tensors=self.tensors)

    def tensors(self) -> Mapping[str, torch.Tensor]:
        if self.broken == "export":
            self.broken = ""
            return {"a": torch.full((1, 3), 7.0)}
        return self.weights

    async def reserve(self, slot: int) -> None:
        await anyio.lowlevel.checkpoint()
        self.paused = len(self.buffers) == 1
        assert self.paused or self.update.version < 0 or slot != self.update.slot

    async def receive(self, offer: Offer) -> None:
        await anyio.lowlevel.checkpoint()
        if self.broken == "deliver":
            self.broken = ""
            raise SyncError("not now")
        assert isinstance(offer, SharedOffer)

    def members(self) -> int:
        return 1

    async def apply(self, update: Update, mode: ApplyMode) -> float:
        await anyio.lowlevel.checkpoint()
        if self.broken == "flip":
            self.broken = ""
            raise SyncError("not now")
        self.update, self.paused = update, False
        if self.cancelled_after_flip is not None:
            self.cancelled_after_flip.cancel()
            await anyio.lowlevel.checkpoint()
        return 0.001

    async def held(self) -> int | None:
        return self.update.version

    def served(self) -> list[list[float]]:
        return self.buffers[self.update.slot].view(torch.float32)[:6].view(2, 3).tolist()


@pytest.mark.parametrize("slots", [2, 1], ids=["two slots", "one slot"])
def test_inproc_sync_keeps_its_contract(slots: int):
    @asynccontextmanager
    async def make() -> AsyncIterator[SyncCase]:
        world = World(slots=slots)

        async def versions() -> list[int]:
            return [-1 if world.paused else world.update.version]

        async def learned() -> dict[str, bytes]:
            return {"w": torch.cat([world.weights["a"], world.weights["b"]]).numpy().tobytes()}

        async def served() -> list[dict[str, bytes]]:
            return [{"w": bytes(world.buffers[world.update.slot][: LAYOUT.nbytes].numpy())}]

        async def train() -> None:
            world.weights["b"] += 1

        async def late() -> Receiver:
            return world

        yield SyncCase(
            sync=world.sync,
            versions=versions,
            break_next=lambda what: setattr(world, "broken", what),
            train=train,
            learned=learned,
            served=served,
            late=late,
            slots=slots,
            breaks=("export", "flip"),
        )

    anyio.run(check_sync, make)


def test_half_written_stage_is_never_served():
    async def main() -> None:
        world = World()
        await world.sync.flip(await stage(world.sync, 0), "swap")
        world.weights["a"].fill_(1.0)
        world.broken = "export"
        with pytest.raises(SyncError, match="'b'"):
            await stage(world.sync, 1)
        assert world.served() == [[0.0] * 3, [0.0] * 3]
        await world.sync.flip(await stage(world.sync, 1), "swap")
        assert world.served() == [[1.0] * 3, [0.0] * 3]

    anyio.run(main)


def test_learner_may_change_its_weights_once_they_are_staged():
    async def main() -> None:
        world = World()
        update = await stage(world.sync, 0)
        world.weights["a"].fill_(5.0)
        await world.sync.flip(update, "swap")
        assert world.served() == [[0.0] * 3, [0.0] * 3]

    anyio.run(main)


def test_first_flip_that_was_cancelled_after_it_happened_keeps_its_slot():
    """The engine holds the update although nobody was told: the next one must go to the other slot."""

    async def main() -> None:
        world = World()
        update = await stage(world.sync, 0)
        with anyio.CancelScope() as world.cancelled_after_flip:
            await world.sync.flip(update, "swap")
        assert world.update == update
        assert (await stage(world.sync, 0)).slot != update.slot

    anyio.run(main)


def test_only_what_is_staged_can_be_flipped_to():
    async def main() -> None:
        world = World()
        update = await stage(world.sync, 0)
        newer = await stage(world.sync, 1)
        with pytest.raises(SyncError, match="version 0 in slot 0 was to be flipped to, but version 1 is staged"):
            await world.sync.flip(update, "swap")
        await world.sync.flip(newer, "swap")
        assert world.sync.stats()["publish/pause_ms"] == pytest.approx(1.0)

    anyio.run(main)


def test_export_delivers_so_that_the_flip_needs_no_turn_before_the_next_step():
    async def main() -> None:
        world = World()
        await world.sync.export(0)
        world.broken = "deliver"
        update = await world.sync.deliver(0)  # nothing is received any more
        assert world.broken == "deliver"
        await world.sync.flip(update, "swap")
        with pytest.raises(SyncError, match="not now"):
            await world.sync.export(1)

    anyio.run(main)
