"""The contract of every Buffer, whatever its order and depth."""

from __future__ import annotations

from collections.abc import Callable

import anyio

from corrente.buffer.base import Buffer
from corrente.errors import EndOfStream
from corrente.testing import samples
from corrente.testing.expect import expect, expect_raises, pending

Make = Callable[[], Buffer]


async def check_buffer(make: Make) -> None:
    """Hold ``make()``, a fresh and empty buffer of at least two slots each time, to the contract of buffer/base.py."""
    await _tickets_are_numbers(make)
    await _slots_are_charged_and_freed(make)
    await _a_cancelled_reserve_admits_nothing(make)
    await _freed_slots_wake_as_many_as_they_serve(make)
    await _take_is_in_admission_order(make)
    await _a_cancelled_take_takes_nothing(make)
    await _drop_frees_at_once_wherever_the_group_is(make)
    await _a_dropped_group_holds_up_nobody(make)
    await _close_ends_admission_and_nothing_else(make)


async def _fill(buffer: Buffer) -> list[int]:
    """Reserve until it would wait."""
    taken: list[int] = []
    while True:
        async with pending(buffer.reserve) as call:
            if not call.done:
                return taken
            taken.append(call.result.id)
            expect(len(taken) <= 100_000, "reserve waits once the slots, or the groups generated at once, are used up")


async def _tickets_are_numbers(make: Make) -> None:
    ids = await _fill(make())
    expect(len(ids) >= 2, "the buffer under test has at least two slots", len(ids))
    expect(ids == sorted(set(ids)), "admission numbers increase and are never reused", ids)
    buffer = make()
    first = (await buffer.reserve()).id
    buffer.drop(first)
    expect((await buffer.reserve()).id > first, "the number of a dropped group is not used again")


async def _slots_are_charged_and_freed(make: Make) -> None:
    buffer = make()
    ids = await _fill(buffer)
    held = buffer.occupancy()
    expect(held.generating == len(ids), "occupancy counts admitted groups as generating", held)
    limit = held.slots
    expect(limit in (0, len(ids)), "reserve waits exactly when every slot is held", held)
    for i in ids:
        buffer.put(samples.group(id=i))
    held = buffer.occupancy()
    expect((held.generating, held.ready) == (0, len(ids)), "put moves a group from generating to ready", held)
    taken = await buffer.take(1)
    held = buffer.occupancy()
    expect((held.ready, held.training) == (len(ids) - 1, 1), "take moves a group from ready to training", held)
    if limit:
        async with pending(buffer.reserve) as call:
            expect(not call.done, "a group keeps its slot while it is trained on")
            buffer.release([taken[0].id])
            await anyio.wait_all_tasks_blocked()
            expect(call.done, "release frees the slot, and wakes who waits for it")
    else:
        buffer.release([taken[0].id])
    expect(buffer.occupancy().training == 0, "release ends training", buffer.occupancy())


async def _a_cancelled_reserve_admits_nothing(make: Make) -> None:
    buffer = make()
    ids = await _fill(buffer)
    async with pending(buffer.reserve) as call:
        await call.cancel()
    expect(buffer.occupancy().generating == len(ids), "cancelling reserve admits nothing", buffer.occupancy())
    async with pending(buffer.reserve) as call:  # the slot comes free and the caller is cancelled in the same instant
        buffer.drop(ids[0])
        await call.cancel()
        if call.done:
            buffer.drop(call.result.id)
    expect(len(await _fill(buffer)) == 1, "a slot freed as its taker is cancelled is not lost")


async def _freed_slots_wake_as_many_as_they_serve(make: Make) -> None:
    buffer = make()
    ids = await _fill(buffer)
    async with pending(buffer.reserve) as one, pending(buffer.reserve) as two, pending(buffer.reserve) as three:
        buffer.drop(ids[0])
        buffer.drop(ids[1])
        await anyio.wait_all_tasks_blocked()
        served = sum(call.done for call in (one, two, three))
        expect(served == 2, "two freed slots admit two waiting groups, no more and no fewer", served)


async def _take_is_in_admission_order(make: Make) -> None:
    buffer = make()
    ids = await _fill(buffer)
    for i in reversed(ids):
        buffer.put(samples.group(id=i))
    seen = [g.id for g in await buffer.take(len(ids))]
    expect(seen == ids, "take returns groups in admission order, whatever the order in which they finished", seen)


async def _a_cancelled_take_takes_nothing(make: Make) -> None:
    buffer = make()
    ids = await _fill(buffer)
    buffer.put(samples.group(id=ids[0]))
    async with pending(lambda: buffer.take(2)) as call:
        expect(not call.done, "take waits until it has as many groups as it was asked for")
        await call.cancel()
    held = buffer.occupancy()
    expect((held.ready, held.training) == (1, 0), "cancelling take takes nothing", held)
    async with pending(lambda: buffer.take(2)) as call:  # the last group comes and the caller is cancelled at once
        buffer.put(samples.group(id=ids[1]))
        await call.cancel()
        taken = [g.id for g in call.result] if call.done else [g.id for g in await buffer.take(2)]
    expect(taken == ids[:2], "a group that comes as its taker is cancelled is not lost", taken)


async def _drop_frees_at_once_wherever_the_group_is(make: Make) -> None:
    buffer = make()
    ids = await _fill(buffer)
    buffer.drop(ids[0])
    expect(len(fresh := await _fill(buffer)) == 1, "dropping a group that is generating admits one")
    buffer.put(samples.group(id=ids[1]))
    buffer.drop(ids[1])
    expect(buffer.occupancy().ready == 0, "a group dropped while it waits is gone", buffer.occupancy())
    fresh += await _fill(buffer)
    expect(len(fresh) == 2, "dropping a group that waits admits one", len(fresh))
    for i in [*ids[2:], *fresh]:
        buffer.put(samples.group(id=i))
    taken = (await buffer.take(1))[0].id
    fresh = await _fill(buffer)
    buffer.drop(taken)
    expect(buffer.occupancy().training == 0, "a group dropped after it was taken is gone", buffer.occupancy())
    if buffer.occupancy().slots:
        expect(len(await _fill(buffer)) == 1, "dropping a group that was taken admits one")


async def _a_dropped_group_holds_up_nobody(make: Make) -> None:
    buffer = make()
    ids = await _fill(buffer)
    for i in ids[1:]:
        buffer.put(samples.group(id=i))
    async with pending(lambda: buffer.take(len(ids) - 1)) as call:
        buffer.drop(ids[0])
        await anyio.wait_all_tasks_blocked()
        expect(call.done, "dropping the group that others wait behind lets them through")
        expect([g.id for g in call.result] == ids[1:], "and they come in admission order")


async def _close_ends_admission_and_nothing_else(make: Make) -> None:
    buffer = make()
    ids = await _fill(buffer)
    async with pending(buffer.reserve) as call:
        buffer.close()
        await anyio.wait_all_tasks_blocked()
        expect(isinstance(call.error, EndOfStream), "close ends a waiting reserve with EndOfStream", call.error)
    buffer.drop(ids[-1])
    await expect_raises(EndOfStream, "reserve after close raises EndOfStream, also with free slots", buffer.reserve)
    async with pending(lambda: buffer.take(len(ids) + 5)) as call:
        expect(not call.done, "after close take still waits for the groups admitted before")
        for i in ids[:-1]:
            buffer.put(samples.group(id=i))
        await anyio.wait_all_tasks_blocked()
        expect(call.done, "after close take returns what is left once no more can come")
        expect([g.id for g in call.result] == ids[:-1], "and that is everything left", [g.id for g in call.result])
    async with pending(lambda: buffer.take(1)) as call:
        expect(call.done and call.result == [], "take on a closed and empty buffer returns nothing at once")
