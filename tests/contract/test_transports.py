"""Every transport and payload, held to one contract: real bytes over real files, sockets, process groups and shared memory.

The learner has tied weights, a transposed and a fused tensor, buffers and five dtypes; two engines take part, a third comes late.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import socket
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import anyio.to_thread
import httpx2
import msgspec
import pytest
import torch

from corrente import config as c
from corrente.data.types import ApplyMode
from corrente.errors import SyncError
from corrente.sync import sender, shared_memory, slot_sync
from corrente.sync.base import OfferRequest, Receiver, Update, stage
from corrente.sync.kinds import transport_of
from corrente.sync.layout import Slab, arrange
from corrente.sync.offers import DiskOffer, HttpOffer, Offer
from corrente.sync.receiver import WeightReceiver
from corrente.sync.weight_slots import map_slots
from corrente.testing import ContractError, SyncCase, check_sync

ROWS = 300


def _slab(name: str, shape: tuple[int, ...], dtype: str, *sources: str, transpose: bool = False) -> Slab:
    return Slab(name=name, shape=shape, dtype=dtype, offset=0, sources=sources, transpose=transpose)


LAYOUT = arrange(
    [
        _slab("qkv", (3 * ROWS, 7), "float32", "q", "k", "v"),
        _slab("down", (7, ROWS), "float32", "q", transpose=True),
        _slab("half", (ROWS, 7), "bfloat16", "q"),
        _slab("embed", (ROWS, 7), "float16", "embed"),
        _slab("head", (ROWS, 7), "float32", "head"),
        _slab("steps", (), "int64", "steps"),
        _slab("mask", (5,), "bool", "mask"),
        _slab("frozen", (ROWS, 7), "float32", "frozen"),
    ]
)


def _raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


class Learner:
    """Weights that move a little at a time; ``head`` is ``embed``."""

    def __init__(self) -> None:
        self.random = torch.Generator().manual_seed(7)
        draw = functools.partial(torch.randn, ROWS, 7, generator=self.random)
        self.weights = {name: draw() for name in ("q", "k", "v", "embed", "frozen")}
        self.weights |= {
            "head": self.weights["embed"],
            "steps": torch.tensor(0),
            "mask": torch.zeros(5, dtype=torch.bool),
        }
        self.weights["q"][0, 0] = torch.nan
        self.torn = False

    def tensors(self) -> Mapping[str, torch.Tensor]:
        torn, self.torn = self.torn, False
        return {name: tensor for name, tensor in self.weights.items() if not (torn and name == "mask")}

    def train(self) -> None:
        """Some elements of some tensors; signs of zeros and payloads of NaNs too."""
        self.weights["steps"] += 1
        self.weights["mask"].logical_not_()
        for name in ("q", "v", "embed"):
            at = torch.randint(0, ROWS, (9,), generator=self.random)
            self.weights[name][at] += 0.5
        self.weights["k"].mul_(1.001)
        self.weights["v"][1, 1] = 0.0 if int(self.weights["steps"]) % 2 else -0.0
        self.weights["q"][0, 0] = torch.nan if int(self.weights["steps"]) % 2 else -torch.nan

    def as_engine(self) -> dict[str, bytes]:
        """What an engine must hold, worked out without the code under test."""
        w = self.weights
        return {
            "qkv": _raw(torch.cat([w["q"], w["k"], w["v"]])),
            "down": _raw(w["q"].T),
            "half": _raw(w["q"].to(torch.bfloat16)),
            "embed": _raw(w["embed"].half()),
            "head": _raw(w["embed"]),
            "steps": _raw(w["steps"]),
            "mask": _raw(w["mask"]),
            "frozen": _raw(w["frozen"]),
        }


class Engine:
    """A receiver, and the update it was flipped to. With one slot it stands still from when that is reserved until a flip."""

    def __init__(self, receiver: WeightReceiver) -> None:
        self.receiver, self.update = receiver, Update(version=-1, slot=1)
        self.spoil: Callable[[Offer], Offer] | None = None
        self.refuses = self.paused = False

    async def reserve(self, slot: int) -> None:
        await anyio.lowlevel.checkpoint()
        if len(self.receiver.slots) == 1:
            self.paused = True
        elif self.update.version >= 0 and self.update.slot == slot:
            raise SyncError("in use")

    async def receive(self, offer: Offer) -> None:
        spoil, self.spoil = self.spoil, None
        offer = spoil(offer) if spoil else offer
        try:
            await anyio.to_thread.run_sync(self.receiver.receive, offer, abandon_on_cancel=True)
        except anyio.get_cancelled_exc_class():
            self.receiver.stop()
            raise

    async def apply(self, update: Update, mode: ApplyMode) -> float:
        await anyio.lowlevel.checkpoint()
        if self.refuses:
            self.refuses = False
            raise SyncError("not now")
        if self.receiver.holds(update.slot) != update.version:
            raise SyncError("never got it")
        self.update, self.paused = update, False
        return 0.001

    @property
    def version(self) -> int:
        return -1 if self.paused else self.update.version

    def members(self) -> int:
        return 1

    def served(self) -> dict[str, bytes]:
        whole = self.receiver.slots[self.update.slot].numpy().tobytes()
        return {slab.name: whole[slab.offset : slab.offset + slab.nbytes] for slab in LAYOUT.slabs}


class Both:
    """Engines as one: all receive, all flip, or none."""

    def __init__(self, engines: list[Engine]) -> None:
        self.engines = engines
        self.absent = 0

    async def reserve(self, slot: int) -> None:
        for engine in self.engines:
            await engine.reserve(slot)

    async def receive(self, offer: Offer) -> None:
        try:
            async with anyio.create_task_group() as tasks:
                for engine in self.engines:
                    tasks.start_soon(engine.receive, offer)
        except* SyncError as errors:
            raise errors.exceptions[0] from None

    async def apply(self, update: Update, mode: ApplyMode) -> float:
        before = [(engine.update, engine.paused) for engine in self.engines]
        try:
            return max([await engine.apply(update, mode) for engine in self.engines])
        except BaseException:
            for engine, old in zip(self.engines, before, strict=True):
                engine.update, engine.paused = old
            raise

    async def held(self) -> int | None:
        return self.engines[0].update.version

    def members(self) -> int:
        absent, self.absent = self.absent, 0
        return len(self.engines) + absent


class World:
    """A learner, its sender, engines and the sync between them, for one section of the config."""

    def __init__(self, section: object, folder: Path, *, slots: int = 2) -> None:
        self.learner = Learner()
        self.slots = slots
        self.config = c.RunConfig(sync=section, run=c.Run(dir=str(folder), name="r"))  # pyright: ignore
        self.memory = shared_memory.SharedMemory() if transport_of(section).shares_memory else None
        path = ""
        if self.memory is not None:
            self.memory.reserve(LAYOUT.nbytes, count=slots)
            path = self.memory.path
        given = map_slots(LAYOUT, path=path, count=slots) if path else None
        self.sender = sender.build(self.config, LAYOUT, shared=given, path=path, slots=slots)
        self.both = Both([self.engine(), self.engine()])
        self.sync = slot_sync.build(section, engine=self.both, sender=self, slots=slots)
        self.offers: list[Offer] = []
        self.spoil: Callable[[Offer], None] | None = None
        self.undeliverable = False

    def engine(self) -> Engine:
        given = map_slots(LAYOUT, path=self.memory.path, count=self.slots) if self.memory else None
        return Engine(WeightReceiver(LAYOUT, given, shared=self.memory is not None, count=self.slots))

    async def export(self, version: int, *, slot: int) -> float:
        work = functools.partial(self.sender.export, version, self.learner.tensors(), slot=slot)
        return await anyio.to_thread.run_sync(work)

    async def offer(self, request: OfferRequest) -> Offer:
        undeliverable, self.undeliverable = self.undeliverable, False
        if undeliverable:
            request = msgspec.structs.replace(request, version=request.version + 1000)
        try:
            offer = await anyio.to_thread.run_sync(self.sender.offer, request, abandon_on_cancel=True)
        except anyio.get_cancelled_exc_class():
            self.sender.stop()
            raise
        self.offers.append(offer)
        spoil, self.spoil = self.spoil, None
        if spoil:
            spoil(offer)
        return offer

    def case(self) -> SyncCase:
        async def versions() -> list[int]:
            return [engine.version for engine in self.both.engines]

        async def served() -> list[dict[str, bytes]]:
            return [engine.served() for engine in self.both.engines]

        async def learned() -> dict[str, bytes]:
            return self.learner.as_engine()

        async def train() -> None:
            self.learner.train()

        async def late() -> Receiver:
            self.both.engines.append(self.engine())
            return self.both.engines[-1]

        return SyncCase(
            sync=self.sync,
            versions=versions,
            break_next=self.break_next,
            faults=tuple(FAULTS.get(type(self.config.sync), {})),
            train=train,
            learned=learned,
            served=served,
            late=late,
            slots=self.slots,
        )

    def break_next(self, what: str) -> None:
        if what == "export":
            self.learner.torn = True
        elif what == "deliver":
            self.undeliverable = True
        elif what == "flip":
            self.both.engines[-1].refuses = True
        else:
            FAULTS[type(self.config.sync)][what](self)

    def close(self) -> None:
        for engine in self.both.engines:
            engine.receiver.close()
        self.sender.close()
        if self.memory:
            self.memory.close()


# ---- what can go wrong on the way ---------------------------------------------------------------------------------------------


def _offer(**changes: object) -> Callable[[World], None]:
    """The last engine is told something else than the learner said."""

    def spoil(world: World) -> None:
        world.both.engines[-1].spoil = lambda offer: msgspec.structs.replace(offer, **changes)

    return spoil


def _files(damage: Callable[[Path], None]) -> Callable[[World], None]:
    def spoil(world: World) -> None:
        def strike(offer: Offer) -> None:
            assert isinstance(offer, DiskOffer)
            damage(Path(offer.path))

        world.spoil = strike

    return spoil


def _truncate(folder: Path) -> None:
    weights = folder / "weights.safetensors"
    os.truncate(weights, weights.stat().st_size - 1)


def _garble(folder: Path) -> None:
    """One bit of the first element; the last byte of a change may be padding."""
    weights = folder / "weights.safetensors"
    data = bytearray(weights.read_bytes())
    data[8 + int.from_bytes(data[:8], "little")] ^= 1
    weights.write_bytes(data)


def _withdraw(world: World) -> None:
    """The learner writes the slot again while engines still fetch from it."""
    world.spoil = lambda offer: world.sender.transport.release(offer.slot)


def _halfway(world: World) -> None:
    """The learner's stream ends after the first piece."""
    offered = world.sender.transport.served  # pyright: ignore

    def strike(offer: Offer) -> None:
        for one in offered.values():
            whole = one.chunk
            one.chunk = lambda at, whole=whole: whole(at)[:100] if at == 0 else b""

    world.spoil = strike


def _absent(world: World) -> None:
    world.both.absent = 1


FAULTS: dict[type, dict[str, Callable[[World], None]]] = {
    c.Disk: {
        "truncated file": _files(_truncate),
        "flipped bit": _files(_garble),
        "no marker": _files(lambda folder: (folder / "commit.json").unlink()),
        "torn marker": _files(lambda folder: (folder / "commit.json").write_text('{"version": 1')),
        "other version": _offer(version=77),
        "no folder": _offer(path="/nowhere"),
    },
    c.Http: {
        "wrong token": _offer(token="guess"),
        "wrong checksum": _offer(digest="0" * 32),
        "withdrawn": _withdraw,
        "stream ends half-way": _halfway,
        "sender is gone": _offer(url="http://127.0.0.1:9/weights/0"),
        "no such version": lambda world: _offer(url=world.offers[-1].url + "0")(world),  # pyright: ignore
        "late": _offer(deadline_s=0.0),
    },
    c.Collective: {
        "wrong checksum": _offer(digest="0" * 32),
        "missing member": _absent,
        "member that leaves": _offer(deadline_s=0.0),
    },
}
KINDS = {
    "inproc": c.Inproc(),
    "shm": c.Shm(),
    "disk": c.Disk(),
    "disk delta": c.Disk(payload="delta", anchor_every=3),
    "http": c.Http(),
    "http delta": c.Http(payload="delta", anchor_every=3),
    "collective": c.Collective(bucket_mb=1, deadline_s=3.0),
}
both_counts = pytest.mark.parametrize("slots", [2, 1], ids=["two slots", "one slot"])


@pytest.mark.parametrize(
    "kind",
    [
        name if name != "collective" else pytest.param(name, marks=pytest.mark.slow)
        for name in KINDS
        if name != "inproc"
    ],
)
@both_counts
def test_transport_keeps_its_contract(kind: str, slots: int, tmp_path: Path):
    @asynccontextmanager
    async def make() -> AsyncIterator[SyncCase]:
        with contextlib.closing(World(KINDS[kind], tmp_path, slots=slots)) as world:
            yield world.case()

    anyio.run(check_sync, make)


# ---- one at a time ------------------------------------------------------------------------------------------------------------


def _play(kind: object, folder: Path, body: Callable[[World, SyncCase], Awaitable[None]]) -> None:
    async def main() -> None:
        with contextlib.closing(World(kind, folder)) as world:
            await body(world, world.case())

    anyio.run(main)


async def _publish(world: World, version: int) -> Offer:
    """Train and publish; both engines must have it. What was offered."""
    world.learner.train()
    await world.sync.flip(await stage(world.sync, version), "swap")
    for engine in world.both.engines:
        assert engine.update.version == version
        assert engine.served() == world.learner.as_engine()
    return world.offers[-1]


DELTAS = {"disk": c.Disk(payload="delta", anchor_every=4), "http": c.Http(payload="delta", anchor_every=4)}
both_deltas = pytest.mark.parametrize("section", DELTAS.values(), ids=DELTAS)


@both_deltas
def test_change_is_shipped_between_anchors_and_is_smaller(section: object, tmp_path: Path):
    async def body(world: World, case: SyncCase) -> None:
        offers = [await _publish(world, version) for version in range(9)]
        assert [offer.base for offer in offers] == [None, 0, 1, 2, None, 4, 5, 6, None]
        assert all(offer.nbytes < offers[0].nbytes for offer in offers if offer.base is not None)

    _play(section, tmp_path, body)


@both_deltas
def test_baseline_stays_until_every_engine_has_flipped(section: object, tmp_path: Path):
    """What was staged and never flipped to, by all or by one, is no base; the next version is whole."""

    async def body(world: World, case: SyncCase) -> None:
        await _publish(world, 0)
        assert (await _publish(world, 1)).base == 0
        world.learner.train()
        await stage(world.sync, 2)
        assert world.offers[-1].base == 1
        assert (await _publish(world, 2)).base is None
        world.learner.train()
        update = await stage(world.sync, 3)
        assert world.offers[-1].base == 2
        world.both.engines[1].refuses = True
        with pytest.raises(SyncError):
            await world.sync.flip(update, "swap")
        assert (await _publish(world, 3)).base is None
        assert (await _publish(world, 4)).base == 3

    _play(section, tmp_path, body)


@both_deltas
def test_change_of_what_an_engine_does_not_hold_is_refused_and_the_next_is_whole(section: object, tmp_path: Path):
    async def body(world: World, case: SyncCase) -> None:
        await _publish(world, 0)
        await _publish(world, 1)
        served = world.both.engines[0].served()
        world.both.engines[1].receiver.close()
        world.both.engines[1].receiver = WeightReceiver(LAYOUT)
        world.learner.train()
        with pytest.raises(SyncError, match="version 2 is a change of version 1; this engine holds None"):
            await stage(world.sync, 2)
        assert world.both.engines[0].served() == served
        assert (await _publish(world, 2)).base is None

    _play(section, tmp_path, body)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("inproc", "shm", "collective")])
@pytest.mark.parametrize("missed", [1, 2])
def test_engine_that_missed_versions_is_caught_up_whichever_slot_it_uses(kind: str, missed: int, tmp_path: Path):
    async def body(world: World, case: SyncCase) -> None:
        await _publish(world, 0)
        stale = world.both.engines.pop()
        for version in range(1, missed + 1):
            await _publish(world, version)
        with pytest.raises(SyncError):
            await stale.apply(Update(version=missed, slot=1 - stale.update.slot), "swap")
        await world.sync.catch_up(stale)
        assert stale.update.slot == world.both.engines[0].update.slot
        assert stale.served() == world.learner.as_engine()
        world.both.engines.append(stale)
        await _publish(world, missed + 1)

    _play(KINDS[kind], tmp_path, body)


def _open_files() -> Counter[str]:
    """What this process has open: paths, and kinds of sockets and of memory without a name."""
    gc.collect()
    found: list[str] = []
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.append(str(entry.readlink()).partition(":[")[0])
    return Counter(found)


def _threads() -> set[str]:
    """Names of the threads of this process. The event loop's own pool ends a little after the loop, whatever it was used for."""
    return {thread.name for thread in threading.enumerate()} - {"AnyIO worker thread"}


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "inproc"])
def test_nothing_is_left_open(kind: str, tmp_path: Path):
    """No descriptor (files, sockets, ports) and no thread outlives a transport; inproc owns none."""

    async def body(world: World, case: SyncCase) -> None:
        for version in range(2):
            await _publish(world, version)

    _play(KINDS[kind], tmp_path / "first", body)
    files, threads = _open_files(), _threads()
    _play(KINDS[kind], tmp_path / "again", body)
    assert not _open_files() - files
    assert _threads() <= threads


def test_there_is_nothing_to_catch_up_with_before_the_first_version(tmp_path: Path):
    async def body(world: World, case: SyncCase) -> None:
        with pytest.raises(SyncError, match="no version is live yet"):
            await world.sync.catch_up(world.both.engines[0])

    _play(c.Disk(), tmp_path, body)


# ---- disk ---------------------------------------------------------------------------------------------------------------------


def _versions(folder: Path) -> list[int]:
    return sorted(int(entry.name[1:9]) for entry in folder.glob("v*"))


def test_disk_keeps_as_many_versions_as_asked_and_the_live_one(tmp_path: Path):
    async def body(world: World, case: SyncCase) -> None:
        for version in range(4):
            await _publish(world, version)
        assert _versions(tmp_path / "w") == [2, 3]
        for _ in range(3):
            await stage(world.sync, 4)
        assert _versions(tmp_path / "w") == [3, 4, 4]
        assert not list((tmp_path / "w").glob(".staged-*"))

    _play(c.Disk(path=str(tmp_path / "w"), keep=2), tmp_path, body)


def test_disk_folder_belongs_to_one_run_and_is_cleared_of_what_an_earlier_one_left(tmp_path: Path):
    section = c.Disk(path=str(tmp_path / "w"))

    async def body(world: World, case: SyncCase) -> None:
        assert _versions(tmp_path / "w") == [20240101]
        await _publish(world, 0)
        with pytest.raises(SyncError, match="in use by another run"):
            World(section, tmp_path)

    for name in (".staged-v00000007-0123abcd", "v00000007-0123abcd", "v20240101-my-thesis"):
        (tmp_path / "w" / name).mkdir(parents=True)
    _play(section, tmp_path, body)
    _play(section, tmp_path, body)
    assert (tmp_path / "w" / "v20240101-my-thesis").is_dir()


def test_disk_folder_of_another_model_is_refused(tmp_path: Path):
    async def body(world: World, case: SyncCase) -> None:
        await _publish(world, 0)
        offer = world.offers[-1]
        fewer = arrange(LAYOUT.slabs[:-1])
        with pytest.raises(SyncError, match="another model: 'frozen'"):
            WeightReceiver(fewer).receive(offer)
        other = arrange(
            [
                msgspec.structs.replace(slab, dtype="int32" if slab.name == "frozen" else slab.dtype)
                for slab in LAYOUT.slabs
            ]
        )
        with pytest.raises(SyncError, match="'frozen' as torch"):
            WeightReceiver(other).receive(offer)

    _play(c.Disk(), tmp_path, body)


def test_disk_that_cannot_be_written_to_is_refused(tmp_path: Path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(SyncError, match=r"sync\.path"):
        World(c.Disk(path=str(tmp_path / "file" / "w")), tmp_path)


# ---- http ---------------------------------------------------------------------------------------------------------------------


def test_http_serves_on_loopback_and_only_who_shows_the_token(tmp_path: Path):
    async def body(world: World, case: SyncCase) -> None:
        offer = await _publish(world, 0)
        assert isinstance(offer, HttpOffer)
        assert offer.url.startswith("http://127.0.0.1:")

        def answer(token: str | None) -> int:
            headers = {} if token is None else {"authorization": f"Bearer {token}"}
            return httpx2.get(offer.url, headers=headers, trust_env=False).status_code

        codes = [
            await anyio.to_thread.run_sync(answer, token) for token in (None, "guess", offer.token[:-1], offer.token)
        ]
        assert codes == [401, 401, 401, 200]

    _play(c.Http(), tmp_path, body)


def test_http_port_that_is_taken_is_refused(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SyncError, match=f"sync.port = {port}"):
            World(c.Http(port=port), tmp_path)


def test_http_port_is_free_again_at_once(tmp_path: Path):
    async def body(world: World, case: SyncCase) -> None:
        await _publish(world, 0)

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    for _ in range(2):
        _play(c.Http(port=port), tmp_path, body)


# ---- collective ---------------------------------------------------------------------------------------------------------------


def test_collective_keeps_its_group_while_the_same_engines_take_part(tmp_path: Path):
    async def body(world: World, case: SyncCase) -> None:
        offers = [await _publish(world, version) for version in range(3)]
        assert {offer.generation for offer in offers} == {1}  # pyright: ignore
        world.both.engines.append(world.engine())
        await world.sync.catch_up(world.both.engines[-1])
        assert (await _publish(world, 3)).generation == 3  # pyright: ignore
        world.both.engines.pop().receiver.close()
        assert (await _publish(world, 4)).generation == 4  # pyright: ignore
        assert (await _publish(world, 5)).generation == 4  # pyright: ignore

    _play(c.Collective(), tmp_path, body)


def test_collective_sends_more_buckets_than_are_in_the_air(tmp_path: Path):
    """Five buckets and a bit, each landing in its place."""
    section = c.Collective(bucket_mb=1)
    layout = arrange([Slab(name="w", shape=(5 * (1 << 18) + 77,), dtype="float32", offset=0, sources=("w",))])
    weights = {"w": torch.arange(5 * (1 << 18) + 77, dtype=torch.float32)}
    box = sender.build(c.RunConfig(sync=section, run=c.Run(dir=str(tmp_path))), layout)
    receiver = WeightReceiver(layout)
    box.export(3, weights, slot=1)
    receiver.receive(box.offer(OfferRequest(version=3, slot=1)))
    assert receiver.slots[1].view(torch.float32)[: len(weights["w"])].equal(weights["w"])
    assert receiver.holds(1) == 3
    receiver.close()
    box.close()


# ---- shared memory, and the receiver -------------------------------------------------------------------------------------------


def test_shared_memory_is_opened_by_its_path_and_copied_where_an_engine_has_slots_of_its_own(tmp_path: Path):
    async def body(world: World, case: SyncCase) -> None:
        offer = await _publish(world, 0)
        foreign = WeightReceiver(LAYOUT)
        foreign.receive(offer)
        assert bytes(foreign.slots[offer.slot].numpy()) == bytes(
            world.both.engines[0].receiver.slots[offer.slot].numpy()
        )
        foreign.close()
        gone = msgspec.structs.replace(offer, path=offer.path + "9999")
        with pytest.raises(SyncError, match="cannot be opened"):
            WeightReceiver(LAYOUT).receive(gone)
        with pytest.raises(SyncError, match="do not fit"):
            map_slots(arrange([_slab("big", (1 << 24,), "float32", "q")]), path=world.memory.path)  # pyright: ignore

    _play(c.Shm(), tmp_path, body)


def test_receive_that_is_stopped_ends_and_holds_nothing(tmp_path: Path):
    """An engine that waits for others who never come gives up when told to, long before its deadline."""
    section = c.Collective(deadline_s=60.0)
    box = sender.build(c.RunConfig(sync=section, run=c.Run(dir=str(tmp_path))), LAYOUT)
    receiver = WeightReceiver(LAYOUT)
    box.export(0, Learner().tensors(), slot=0)
    offer = box.offer(OfferRequest(version=0, slot=0, members=2))
    failures: list[str] = []

    def receive() -> None:
        try:
            receiver.receive(offer)
        except SyncError as error:
            failures.append(str(error))

    thread = threading.Thread(target=receive)
    thread.start()
    while not receiver.is_receiving:
        pass
    receiver.stop()
    thread.join(10)
    assert failures == ["version 0 was given up while it was fetched"]
    assert receiver.holds(0) is None
    receiver.close()
    box.close()


# ---- the suite can fail -------------------------------------------------------------------------------------------------------


class UntiedOnTheWay(World):
    """Sends the tied weight as it was at the start."""

    def __init__(self, section: object, folder: Path) -> None:
        super().__init__(section, folder)
        first = self.learner.weights["head"].clone()
        complete = self.learner.tensors
        self.learner.tensors = lambda: {**complete(), "head": first}


class EagerEngine(Engine):
    """Samples from what it receives before it is told to."""

    async def receive(self, offer: Offer) -> None:
        await super().receive(offer)
        self.update = Update(version=offer.version, slot=offer.slot)

    async def reserve(self, slot: int) -> None:
        await anyio.lowlevel.checkpoint()


class Eager(World):
    def engine(self) -> Engine:
        return EagerEngine(super().engine().receiver)


class DeafToLateOnes(World):
    """Lets a late engine in without weights."""

    def case(self) -> SyncCase:
        async def nothing(receiver: Receiver) -> None:
            await anyio.lowlevel.checkpoint()

        self.sync.catch_up = nothing
        return super().case()


class Careless(World):
    """Engines that do not look at what arrived."""

    def engine(self) -> Engine:
        engine = super().engine()
        receive = engine.receiver.receive

        def believe(offer: Offer) -> None:
            with contextlib.suppress(SyncError):
                receive(offer)
            engine.receiver.versions[offer.slot] = offer.version

        engine.receiver.receive = believe
        return engine


@pytest.mark.parametrize(
    ("broken", "clause"),
    [
        (UntiedOnTheWay, r"bit for bit \(seen: engine 0: head\)"),
        (Eager, "delivering changes no engine's version"),
        (DeafToLateOnes, "an engine that comes late is given the live version"),
        (Careless, r"half-way \(truncated file\) raises SyncError"),
    ],
)
def test_transport_that_breaks_the_contract_is_caught(broken: type[World], clause: str, tmp_path: Path):
    @asynccontextmanager
    async def make() -> AsyncIterator[SyncCase]:
        with contextlib.closing(broken(c.Disk(), tmp_path)) as world:
            yield world.case()

    with pytest.raises(ContractError, match=clause):
        anyio.run(check_sync, make)
