"""Weights through shared memory between real processes: what is served is always one whole version, and the right one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import anyio.from_thread
import numpy as np
import pytest

from corrente import config as c
from corrente.config import RunConfig
from corrente.data.types import Batch, Request, Sampling
from corrente.errors import SyncError
from corrente.runtime.base import Workers
from corrente.runtime.procs import ProcsRuntime
from corrente.sync.base import stage
from corrente.testing import SyncCase, check_sync

pytestmark = pytest.mark.slow

TORN, UNWELCOME = -8, 99

Run = Callable[[Callable[[Workers], Awaitable[None]]], None]


def _open():
    return ProcsRuntime(engine="one_weight_cores:engine", learner="one_weight_cores:learner").open(RunConfig())


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Runs test bodies against one pair of workers; each finds the versions where the last one left them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parent)
        with anyio.from_thread.start_blocking_portal() as portal, portal.wrap_async_context_manager(_open()) as workers:
            yield lambda body: portal.call(body, workers)


async def _publish(workers: Workers, version: int) -> None:
    await workers.sync.flip(await stage(workers.sync, version), "swap")


async def _step(workers: Workers, order: int = 0) -> float:
    """One training step; the weight after it."""
    return (await workers.learner.step(Batch(step=order, version=0, rows=(), sequences=0, tokens=0)))["weight"]


async def _served(workers: Workers) -> tuple[float, int]:
    """The weight that the engine samples from, and the version it says it is."""
    request = Request(id="r", tokens=np.array([1], np.int32), sampling=Sampling(max_tokens=3))
    done = await workers.engine.generate(request)
    (weight,), (version,) = set(done.logprobs.tolist()), set(done.versions.tolist())
    return weight, version


def test_weights_reach_the_engine_and_tokens_say_which(run: Run):
    async def body(workers: Workers) -> None:
        with anyio.move_on_after(0.1) as waiting:
            await _served(workers)
        assert waiting.cancelled_caught, "no request is served before the first weights"
        for version in range(4):
            await _publish(workers, version)
            assert await _served(workers) == (version, version)
            assert (await workers.engine.stats()).version == version
            assert (await workers.engine.score(np.arange(5, dtype=np.int32))).logprobs.tolist() == [version] * 4
            assert await _step(workers) == version + 1
        stats = workers.sync.stats()
        assert stats["publish/bytes"] == 4000
        assert stats["publish/stage_s"] > 0
        assert stats["publish/bandwidth_gb_s"] == pytest.approx(4000 / stats["publish/stage_s"] / 1e9)
        assert 0 < stats["publish/pause_ms"] < 1000

    run(body)


def test_staging_does_not_change_what_is_served_until_the_flip(run: Run):
    async def body(workers: Workers) -> None:
        weight = await _step(workers)
        await _publish(workers, 10)
        after = await _step(workers)
        update = await stage(workers.sync, 11)
        assert await _served(workers) == (weight, 10)
        again = await stage(workers.sync, 11)
        assert again == update
        await workers.sync.flip(again, "swap")
        assert await _served(workers) == (after, 11)
        with pytest.raises(SyncError, match="nothing is staged"):
            await workers.sync.flip(again, "swap")

    run(body)


def test_failed_stage_leaves_the_old_version_and_the_next_publish_works(run: Run):
    async def body(workers: Workers) -> None:
        await _publish(workers, 20)
        before = await _served(workers)
        after = await _step(workers, TORN)
        with pytest.raises(SyncError, match="MemoryError: no room for a copy"):
            await stage(workers.sync, 21)
        assert await _served(workers) == before
        await _publish(workers, 21)
        assert await _served(workers) == (after, 21)

    run(body)


def test_refused_flip_leaves_the_old_version_and_may_be_tried_again(run: Run):
    async def body(workers: Workers) -> None:
        await _publish(workers, 30)
        before = await _served(workers)
        after = await _step(workers)
        update = await stage(workers.sync, UNWELCOME)
        for _ in range(2):
            with pytest.raises(SyncError, match="RuntimeError: this one will not do"):
                await workers.sync.flip(update, "swap")
        assert await _served(workers) == before
        await _publish(workers, 31)
        assert await _served(workers) == (after, 31)

    run(body)


def test_cancelled_flip_is_taken_back(run: Run):
    async def body(workers: Workers) -> None:
        await _publish(workers, 40)
        before = await _served(workers)
        after = await _step(workers)
        update = await stage(workers.sync, 41)
        async with anyio.create_task_group() as group:
            group.start_soon(workers.sync.flip, update, "swap")
            await anyio.lowlevel.checkpoint()
            group.cancel_scope.cancel()
        assert await _served(workers) == before
        await _publish(workers, 41)
        assert await _served(workers) == (after, 41)

    run(body)


def test_cancelled_stage_leaves_the_old_version(run: Run):
    async def body(workers: Workers) -> None:
        await _publish(workers, 50)
        before = await _served(workers)
        after = await _step(workers)
        async with anyio.create_task_group() as group:
            group.start_soon(stage, workers.sync, 51)
            await anyio.lowlevel.checkpoint()
            group.cancel_scope.cancel()
        assert await _served(workers) == before
        await _publish(workers, 51)
        assert await _served(workers) == (after, 51)

    run(body)


def test_tokens_on_both_sides_of_a_flip_carry_their_own_version(run: Run):
    """Live sequences go on while versions land; every token's weight is the one its version had."""

    async def body(workers: Workers) -> None:
        weights: dict[int, float] = {}
        seen: dict[int, set[float]] = {}

        async def ask() -> None:
            request = Request(id="long", tokens=np.array([1], np.int32), sampling=Sampling(max_tokens=10**9))
            done = await workers.engine.generate(request)
            for version, logprob in zip(done.versions.tolist(), done.logprobs.tolist(), strict=True):
                seen.setdefault(version, set()).add(logprob)

        await _publish(workers, 60)
        weights[60] = (await _served(workers))[0]
        async with anyio.create_task_group() as group:
            group.start_soon(ask)
            for version in range(61, 66):
                weights[version] = await _step(workers)
                await _publish(workers, version)
            await workers.engine.stats()
            await workers.engine.abort(["long"])
        assert len(seen) >= 3
        assert seen == {version: {weights[version]} for version in seen}

    run(body)


def test_two_runtimes_at_once_do_not_meet(run: Run):
    async def body(workers: Workers) -> None:
        await _publish(workers, 70)
        before = await _served(workers)
        async with _open() as others:
            await _publish(others, 0)
            assert await _served(others) == (0.0, 0)
            assert await _served(workers) == before

    run(body)


def test_sync_over_shared_memory_keeps_its_contract(run: Run):
    async def body(workers: Workers) -> None:
        async def versions() -> list[int]:
            return [(await workers.engine.stats()).version]

        @asynccontextmanager
        async def make() -> AsyncIterator[SyncCase]:
            yield SyncCase(sync=workers.sync, versions=versions)

        await check_sync(make)

    run(body)


def test_engines_with_slots_of_their_own_copy_from_shared_memory_and_are_told_their_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """As engines on a GPU do; these say that they compute elsewhere than where the shared slots are."""
    monkeypatch.syspath_prepend(Path(__file__).parent)
    config = RunConfig(run=c.Run(dir=str(tmp_path)), pool=c.Pool(replicas=2))

    async def play() -> None:
        async with ProcsRuntime(engine="one_weight_cores:apart", learner="one_weight_cores:learner").open(
            config
        ) as workers:
            for version in range(3):
                learned = await _step(workers)
                await _publish(workers, version)
                assert [await _served(workers) for _ in range(2)] == [(learned, version)] * 2

    anyio.run(play)
    assert {path.name for path in tmp_path.glob("turn-*")} == {"turn-0", "turn-1"}
