"""Buffers beyond their contract: what the window lets through, what anchors it, and what close means inside it."""

from __future__ import annotations

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corrente.buffer.stream import StreamBuffer
from corrente.buffer.window import WindowBuffer
from corrente.errors import LedgerError
from corrente.testing import run_virtual, samples
from corrente.testing.expect import pending


async def fill(buffer: WindowBuffer | StreamBuffer, count: int) -> list[int]:
    return [(await buffer.reserve()).id for _ in range(count)]


def test_window_looks_past_a_slow_group_as_far_as_its_width() -> None:
    async def main() -> None:
        buffer = WindowBuffer(slots=6, window=3)
        await fill(buffer, 6)
        for i in (1, 2, 3, 4, 5):
            buffer.put(samples.group(id=i))
        assert [g.id for g in await buffer.take(2)] == [1, 2]
        async with pending(lambda: buffer.take(1)) as call:  # 3 is the fourth in line, behind 0 and two that were taken
            assert not call.done
            buffer.put(samples.group(id=0))
            await anyio.wait_all_tasks_blocked()
            assert [g.id for g in call.result] == [0]
        assert [g.id for g in await buffer.take(3)] == [3, 4, 5]

    run_virtual(main)


def test_window_moves_on_as_the_oldest_groups_are_picked() -> None:
    """One take may walk down the whole line, as long as nothing unfinished is left behind by more than the window."""

    async def main() -> None:
        buffer = WindowBuffer(slots=8, window=2)
        await fill(buffer, 8)
        for i in (0, 1, 2, 4):
            buffer.put(samples.group(id=i))
        assert [g.id for g in await buffer.take(4)] == [0, 1, 2, 4]
        buffer.put(samples.group(id=5))
        async with pending(lambda: buffer.take(1)) as call:
            assert not call.done  # 3 anchors the window at [3, 4], and 4 is taken

    run_virtual(main)


def test_window_of_one_is_first_in_first_out() -> None:
    async def main() -> None:
        buffer = WindowBuffer(slots=4, window=1)
        await fill(buffer, 4)
        for i in (3, 2, 1):
            buffer.put(samples.group(id=i))
        async with pending(lambda: buffer.take(1)) as call:
            assert not call.done
            buffer.drop(0)
            await anyio.wait_all_tasks_blocked()
            assert [g.id for g in call.result] == [1]

    run_virtual(main)


def test_groups_dropped_after_they_overtook_give_their_place_back() -> None:
    async def main() -> None:
        buffer = WindowBuffer(slots=5, window=2)
        await fill(buffer, 5)
        for i in (1, 2):
            buffer.put(samples.group(id=i))
        (taken,) = await buffer.take(1)
        assert taken.id == 1
        buffer.drop(1)  # stale: it is not trained on, so it did not overtake anybody
        assert [g.id for g in await buffer.take(1)] == [2]

    run_virtual(main)


def test_misuse_of_a_buffer_is_our_own_bug() -> None:
    async def main() -> None:
        for buffer in (WindowBuffer(slots=2, window=1), StreamBuffer(inflight=2)):
            await fill(buffer, 1)
            buffer.put(samples.group(id=0))
            with pytest.raises(LedgerError, match="put twice"):
                buffer.put(samples.group(id=0))
            with pytest.raises(LedgerError, match="never admitted"):
                buffer.drop(7)
            buffer.drop(0)
            with pytest.raises(LedgerError, match="dropped twice"):
                buffer.drop(0)

    run_virtual(main)


@pytest.mark.parametrize(("slots", "window"), [(0, 0), (3, 0), (3, 4), (3, -1)])
def test_window_that_does_not_fit_is_refused(slots: int, window: int) -> None:
    with pytest.raises(ValueError, match=r"window .* must lie in"):
        WindowBuffer(slots=slots, window=window)


def test_stream_hands_out_what_finished_first_and_never_stops_admitting() -> None:
    async def main() -> None:
        buffer = StreamBuffer(inflight=2)
        await fill(buffer, 2)
        for i in range(50):
            buffer.put(samples.group(id=1 if i == 0 else i + 1))
            assert (await buffer.reserve()).id == i + 2
        assert buffer.occupancy().ready == 50
        assert [g.id for g in await buffer.take(3)] == [1, 2, 3]
        buffer.put(samples.group(id=0))
        assert [g.id for g in await buffer.take(47)] == list(range(4, 51))
        assert [g.id for g in await buffer.take(1)] == [0]

    run_virtual(main)


class Model:
    """The window buffer as a list: what may be taken, said as plainly as possible."""

    def __init__(self, slots: int, window: int) -> None:
        self.slots, self.window, self.line, self.held = slots, window, [], set()

    def takeable(self, count: int) -> list[int] | None:
        """Ids that ``take(count)`` returns now; None when it waits."""
        line, picked = [dict(e) for e in self.line], []
        while len(picked) < count:
            ready = [e for e in line[: self.window] if e["state"] == "ready"]
            if not ready:
                return None
            ready[0]["state"] = "taken"
            picked.append(ready[0]["id"])
            while line and line[0]["state"] == "taken":
                line.pop(0)
        return picked

    def set(self, i: int, state: str) -> None:
        next(e for e in self.line if e["id"] == i)["state"] = state
        while self.line and self.line[0]["state"] == "taken":
            self.line.pop(0)


@settings(max_examples=30)
@given(
    shape=st.integers(1, 7).flatmap(lambda slots: st.tuples(st.just(slots), st.integers(1, slots))),
    moves=st.lists(
        st.tuples(st.sampled_from(["put", "drop", "take", "release", "reserve"]), st.integers(0, 9)), max_size=60
    ),
)
def test_window_agrees_with_its_model(shape: tuple[int, int], moves: list[tuple[str, int]]) -> None:
    async def main() -> None:
        buffer, model = WindowBuffer(slots=shape[0], window=shape[1]), Model(*shape)
        generating: list[int] = []
        taken: list[int] = []
        for move, n in moves:
            if move == "reserve" and len(model.held) < model.slots:
                i = (await buffer.reserve()).id
                model.line.append({"id": i, "state": "generating"})
                model.held.add(i)
                generating.append(i)
            elif move == "put" and generating:
                i = generating.pop(n % len(generating))
                buffer.put(samples.group(id=i))
                model.set(i, "ready")
            elif move == "drop" and model.held:
                i = sorted(model.held)[n % len(model.held)]
                buffer.drop(i)
                model.held.remove(i)
                model.line = [e for e in model.line if e["id"] != i]
                while model.line and model.line[0]["state"] == "taken":
                    model.line.pop(0)
                generating = [g for g in generating if g != i]
                taken = [t for t in taken if t != i]
            elif move == "take":
                count = 1 + n % 3
                expected = model.takeable(count)
                async with pending(lambda count=count: buffer.take(count)) as call:
                    assert (call.result is not None) == (expected is not None)
                    for g in call.result or []:
                        model.set(g.id, "taken")
                        taken.append(g.id)
                    assert expected is None or [g.id for g in call.result] == expected
            elif move == "release" and taken:
                i = taken.pop(n % len(taken))
                buffer.release([i])
                model.held.remove(i)
            held = buffer.occupancy()
            assert held.generating + held.ready + held.training == len(model.held) <= model.slots

    run_virtual(main)
