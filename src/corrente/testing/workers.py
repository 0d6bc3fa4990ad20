"""The contracts of every Sync and every Learner."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import msgspec

from corrente.data.types import Batch
from corrente.errors import CheckpointError, DivergedError, SyncError
from corrente.learner.base import Learner
from corrente.sync.base import Receiver, Sync, stage
from corrente.testing.expect import expect, expect_raises, pending

Weights = Mapping[str, bytes]
"""Tensors by name, as the bytes they are stored as."""


class SyncCase(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A sync between a learner and engines that hold no weights yet, which have ``slots`` slots each.

    ``versions`` says what each engine would sample with now, -1 for one that samples nothing. ``break_next``: make the next
    export ("export"), delivery ("deliver", and every name in ``faults``) or flip ("flip") fail half-way; None where that cannot
    be arranged. ``breaks``: which of the three it can.

    Where the weights themselves can be looked at: ``served`` gives those each engine would sample with, ``learned`` those that
    the learner has, both by name and as the engine stores them; ``train`` changes some of the learner's. ``late`` starts one
    more engine, which holds nothing, and from then on counts among ``versions`` and ``served`` and takes part.
    """

    sync: Sync
    versions: Callable[[], Awaitable[Sequence[int]]]
    break_next: Callable[[str], None] | None = None
    breaks: Sequence[str] = ("export", "deliver", "flip")
    faults: Sequence[str] = ()
    train: Callable[[], Awaitable[None]] | None = None
    learned: Callable[[], Awaitable[Weights]] | None = None
    served: Callable[[], Awaitable[Sequence[Weights]]] | None = None
    late: Callable[[], Awaitable[Receiver]] | None = None
    slots: int = 2


async def check_sync(make: Callable[[], AbstractAsyncContextManager[SyncCase]]) -> None:
    """Hold the sync that entering ``make()`` gives to the contract of sync/base.py; each clause gets a fresh one."""
    for clause in (
        _nothing_changes_before_the_flip,
        _delivery_is_of_what_was_exported,
        _flip_is_everywhere,
        _failures_leave_the_old_version,
        _every_fault_leaves_the_old_version,
        _cancelling_is_safe,
        _late_engines_are_caught_up,
    ):
        async with make() as case:
            await clause(case)


async def _publish(case: SyncCase, version: int) -> None:
    """Train, publish, and find in every engine what was trained."""
    await _train(case)
    update = await stage(case.sync, version)
    expect(update.version == version, "an update carries the version it was exported as", update)
    flip = await case.sync.flip(update, "swap")
    expect(flip.pause_s >= 0, "flip says how long engines paused", flip)
    await _expect_everywhere(case, version, await _learned(case), "after flip every engine holds the new version")


async def _train(case: SyncCase) -> None:
    if case.train is not None:
        await case.train()


async def _learned(case: SyncCase) -> Weights:
    return {} if case.learned is None else dict(await case.learned())


async def _expect_everywhere(case: SyncCase, version: int, weights: Weights, clause: str) -> None:
    seen = await case.versions()
    expect(set(seen) == {version}, clause, seen)
    await _expect_weights(case, seen, weights, clause)


async def _expect_old(case: SyncCase, version: int, weights: Weights, clause: str) -> None:
    """Every engine serves ``version`` as it was; one with a single slot may serve nothing instead, never a part of another."""
    if case.slots == 2:
        return await _expect_everywhere(case, version, weights, clause)
    seen = await case.versions()
    expect(set(seen) <= {version, -1}, f"{clause}, or nothing", seen)
    await _expect_weights(case, seen, weights, clause)


async def _expect_weights(case: SyncCase, seen: Sequence[int], weights: Weights, clause: str) -> None:
    if case.served is None:
        return
    for number, (version, served) in enumerate(zip(seen, await case.served(), strict=True)):
        if version < 0:
            continue
        expect(set(served) == set(weights), f"{clause}, with all its tensors", sorted(set(served) ^ set(weights)))
        other = [name for name in weights if served[name] != weights[name]]
        expect(not other, f"{clause}, bit for bit", f"engine {number}: {', '.join(other)}")


async def _nothing_changes_before_the_flip(case: SyncCase) -> None:
    await _publish(case, 0)
    old = await _learned(case)
    await _train(case)
    new = await _learned(case)
    await case.sync.export(1)
    await _expect_old(case, 0, old, "exporting changes no engine's version")
    update = await case.sync.deliver(1)
    await _expect_old(case, 0, old, "delivering changes no engine's version")
    if case.slots == 1:
        seen = await case.versions()
        expect(set(seen) == {-1}, "an engine whose only slot was written to serves nothing before the flip", seen)
    await _train(case)
    await case.sync.flip(update, "swap")
    await _expect_everywhere(case, 1, new, "what is flipped to is what the learner had when it was exported")


async def _delivery_is_of_what_was_exported(case: SyncCase) -> None:
    """The learner goes on between the two, and a delivery that failed is one of the same weights."""
    await _publish(case, 0)
    for version in (1, 2):
        await _train(case)
        new = await _learned(case)
        await case.sync.export(version)
        await _train(case)
        if case.break_next is not None and "deliver" in case.breaks:
            case.break_next("deliver")
            clause = "a delivery that fails raises SyncError"
            await expect_raises(SyncError, clause, lambda v=version: case.sync.deliver(v))
        update = await case.sync.deliver(version)
        await case.sync.flip(update, "swap")
        await _expect_everywhere(case, version, new, "what is delivered is what the learner had when it was exported")
    await expect_raises(SyncError, "delivering what was not exported raises SyncError", lambda: case.sync.deliver(7))


async def _flip_is_everywhere(case: SyncCase) -> None:
    for version in range(4):
        await _publish(case, version)
    stats = case.sync.stats()
    expect(all(math.isfinite(v) for v in stats.values()), "stats are finite numbers", stats)


async def _failures_leave_the_old_version(case: SyncCase) -> None:
    if case.break_next is None:
        return
    await _publish(case, 0)
    old = await _learned(case)
    await _train(case)
    if "export" in case.breaks:
        case.break_next("export")
        await expect_raises(SyncError, "an export that fails raises SyncError", lambda: case.sync.export(1))
        await _expect_old(case, 0, old, "after a failed export every engine holds the old version")
        await expect_raises(SyncError, "and there is nothing to deliver", lambda: case.sync.deliver(1))
    new = await _learned(case)
    await case.sync.export(1)
    if "deliver" in case.breaks:
        case.break_next("deliver")
        await expect_raises(SyncError, "a delivery that fails raises SyncError", lambda: case.sync.deliver(1))
        await _expect_old(case, 0, old, "after a failed delivery every engine holds the old version")
    update = await case.sync.deliver(1)
    case.break_next("flip")
    await expect_raises(SyncError, "a flip that fails raises SyncError", lambda: case.sync.flip(update, "swap"))
    clause = "after a failed flip every engine, the first and the last, holds the old version"
    await _expect_old(case, 0, old, clause)
    await case.sync.flip(update, "swap")
    await _expect_everywhere(case, 1, new, "the same update may be flipped to again")
    await _publish(case, 2)


async def _every_fault_leaves_the_old_version(case: SyncCase) -> None:
    if case.break_next is None:
        return
    await _publish(case, 0)
    await _publish(case, 1)
    old = await _learned(case)
    for version, fault in enumerate(case.faults, start=2):
        await _train(case)
        new = await _learned(case)
        await case.sync.export(version)
        case.break_next(fault)
        clause = f"a delivery that fails half-way ({fault}) raises SyncError"
        await expect_raises(SyncError, clause, lambda v=version: case.sync.deliver(v))
        await _expect_old(case, version - 1, old, f"after it ({fault}) every engine holds the old version")
        await _train(case)
        await case.sync.flip(await case.sync.deliver(version), "swap")
        await _expect_everywhere(case, version, new, f"after it ({fault}) the same version may be delivered again")
        old = new


async def _cancelling_is_safe(case: SyncCase) -> None:
    await _publish(case, 0)
    old = await _learned(case)
    await _train(case)
    async with pending(lambda: case.sync.export(1)) as call:
        await call.cancel()
    await _expect_old(case, 0, old, "cancelling an export leaves the old version in use")
    await case.sync.export(1)
    async with pending(lambda: case.sync.deliver(1)) as call:
        await call.cancel()
    await _expect_old(case, 0, old, "cancelling a delivery leaves the old version in use")
    await _publish(case, 1)
    update = await stage(case.sync, 2)
    async with pending(lambda: case.sync.flip(update, "swap")) as call:
        await call.cancel()
    seen = set(await case.versions()) - ({-1} if case.slots == 1 else set())
    expect(seen in ({1}, {2}) or not seen, "cancelling flip leaves every engine on one version", seen)
    await _publish(case, 3 if not seen else max(seen) + 1)


async def _late_engines_are_caught_up(case: SyncCase) -> None:
    if case.late is None:
        return
    for version in range(3):
        await _publish(case, version)
    live = await _learned(case)
    await _train(case)
    await case.sync.catch_up(await case.late())
    await _expect_everywhere(case, 2, live, "an engine that comes late is given the live version")
    await _publish(case, 3)
    await _publish(case, 4)


class LearnerCase(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A learner, a batch it can train on, and ``fingerprint``: equal when, and only when, weights and optimizer are equal.

    ``poisoned``: a batch whose loss is not finite; None where there is no such thing.
    """

    learner: Learner
    batch: Batch
    fingerprint: Callable[[], Any]
    poisoned: Batch | None = None


async def check_learner(make: Callable[[], AbstractAsyncContextManager[LearnerCase]], folder: Path) -> None:
    """Hold the learner that entering ``make()`` gives to the contract of learner/base.py. ``folder``: empty, for checkpoints."""
    for clause in (_a_step_moves, _nothing_to_train_on_moves_nothing, _divergence_moves_nothing):
        async with make() as case:
            await clause(case)
    async with make() as case:
        await _save_and_load(case, folder)


async def _a_step_moves(case: LearnerCase) -> None:
    before, pieces = case.fingerprint(), case.learner.progress()
    metrics = await case.learner.step(case.batch)
    expect(case.learner.progress() > pieces, "a step makes progress", pieces)
    expect(case.fingerprint() != before, "a step changes the weights")
    expect(all(math.isfinite(v) for v in metrics.values()), "metrics are finite numbers", metrics)


async def _nothing_to_train_on_moves_nothing(case: LearnerCase) -> None:
    await case.learner.step(case.batch)
    before = case.fingerprint()
    await case.learner.step(msgspec.structs.replace(case.batch, step=case.batch.step + 1, rows=()))
    expect(case.fingerprint() == before, "a batch without rows leaves weights and optimizer untouched")


async def _divergence_moves_nothing(case: LearnerCase) -> None:
    if case.poisoned is None:
        return
    poisoned, before = case.poisoned, case.fingerprint()
    clause = "a loss that is not finite raises DivergedError"
    await expect_raises(DivergedError, clause, lambda: case.learner.step(poisoned))
    expect(case.fingerprint() == before, "and leaves the weights as they were")


async def _save_and_load(case: LearnerCase, folder: Path) -> None:
    good, empty = folder / "good", folder / "empty"
    good.mkdir()
    empty.mkdir()
    await case.learner.step(case.batch)
    saved = case.fingerprint()
    await case.learner.save(good)
    expect(case.fingerprint() == saved, "save changes nothing")
    later = msgspec.structs.replace(case.batch, step=case.batch.step + 1)
    await case.learner.step(later)
    after = case.fingerprint()
    clause = "loading from a directory without a checkpoint raises CheckpointError"
    await expect_raises(CheckpointError, clause, lambda: case.learner.load(empty))
    expect(case.fingerprint() == after, "and leaves the learner as it was")
    await case.learner.load(good)
    expect(case.fingerprint() == saved, "load restores what was saved")
    await case.learner.step(later)
    expect(case.fingerprint() == after, "and the step after it repeats")
    (folder / "file").write_text("in the way")
    clause = "saving where no directory can be raises CheckpointError"
    await expect_raises(CheckpointError, clause, lambda: case.learner.save(folder / "file" / "inside"))
    expect(case.fingerprint() == after, "and leaves the learner as it was")
