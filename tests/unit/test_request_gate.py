"""The gate between pipeline and engine under each landing: who waits for whom, and that nobody waits for ever."""

from __future__ import annotations

from collections.abc import Sequence

import anyio
import pytest

from corrente.controller.request_gate import PATIENCE_S, RequestGate
from corrente.errors import GenerationError, SyncError
from corrente.inflight.policies import (
    BarrierPolicy,
    CancelPolicy,
    DrainPolicy,
    OldWeightsPolicy,
    RecomputePolicy,
    ResumePolicy,
    SwapPolicy,
)
from corrente.testing import run_virtual
from corrente.testing.expect import pending


async def no_engine(ids: Sequence[str]) -> None:
    raise AssertionError(f"nobody was to be interrupted, but {ids} were")


async def passed(gate: RequestGate) -> None:
    """One request, over as soon as it is let in."""
    async with gate.request("r"):
        pass


def land(policy, *, entries: list[tuple[float, float]]) -> tuple[float, list[float], str]:
    """Requests that start and last so many seconds, and a landing that begins at 10: when it flipped, when each got in."""

    async def main() -> tuple[float, list[float], str]:
        gate, entered, flips = RequestGate(no_engine), [0.0] * len(entries), []

        async def request(at: int, start_s: float, lasts_s: float) -> None:
            await anyio.sleep(start_s)
            async with gate.group(at, version=0), gate.request(str(at)):
                entered[at] = anyio.current_time()
                await anyio.sleep(lasts_s)

        async def flip(mode: str) -> None:
            flips.append((anyio.current_time(), mode))
            await anyio.sleep(1.0)

        async with anyio.create_task_group() as tasks:
            for at, (start_s, lasts_s) in enumerate(entries):
                tasks.start_soon(request, at, start_s, lasts_s)
            await anyio.sleep(10.0)
            await policy.land(gate, flip, version=1)
        assert gate.live == (0, 0)
        return flips[0][0], entered, flips[0][1]

    return run_virtual(main, limit_s=1000)


@pytest.mark.parametrize(
    ("policy", "mode"),
    [
        (SwapPolicy(), "swap"),
        (RecomputePolicy(), "recompute"),
        (CancelPolicy(max_age=1), "swap"),
        (OldWeightsPolicy(), "snapshot"),
    ],
)
def test_swap_recompute_cancel_and_snapshot_flip_at_once(policy, mode: str) -> None:
    assert land(policy, entries=[(0.0, 50.0), (10.5, 1.0)]) == (10.0, [0.0, 10.5], mode)


@pytest.mark.parametrize("policy", [DrainPolicy(), BarrierPolicy()])
def test_drain_and_barrier_wait_for_the_live_and_hold_back_the_new(policy) -> None:
    at_s, entered, mode = land(policy, entries=[(0.0, 50.0), (5.0, 10.0), (12.0, 1.0), (70.0, 1.0)])
    assert (at_s, mode) == (50.0, "swap")
    assert entered == [0.0, 5.0, 51.0, 70.0]


def test_failed_or_cancelled_landing_lets_the_held_in() -> None:
    async def main() -> None:
        for policy in (DrainPolicy(), BarrierPolicy(), ResumePolicy()):

            async def deaf(ids: Sequence[str]) -> None:
                pass

            gate = RequestGate(deaf)

            async def fail(mode: str) -> None:
                raise SyncError("no")

            with pytest.raises(SyncError):
                await policy.land(gate, fail, version=1)
            async with gate.group(0, version=0), gate.request("r"):
                pass
            live = gate.group(1, version=0) if isinstance(policy, BarrierPolicy) else gate.request("r")
            await live.__aenter__()
            async with pending(lambda policy=policy, gate=gate: policy.land(gate, fail, version=1)) as landing:
                assert not landing.done
                await landing.cancel()
            async with gate.group(2, version=0), gate.request("r"):
                pass
            await live.__aexit__(None, None, None)

    run_virtual(main)


def test_cancelling_a_held_request_leaves_no_trace() -> None:
    async def main() -> None:
        gate = RequestGate(no_engine)
        async with gate.quiet_requests():
            async with pending(lambda: passed(gate)) as held:
                assert not held.done
                await held.cancel()
            assert gate.live == (0, 0)
        async with gate.request("r"):
            assert gate.live == (1, 0)

    run_virtual(main)


def test_two_holders_hold_until_both_let_go() -> None:
    async def main() -> None:
        gate = RequestGate(no_engine)
        first, second = gate.quiet_requests(), gate.quiet_requests()
        await first.__aenter__()
        await second.__aenter__()
        async with pending(lambda: passed(gate)) as held:
            await first.__aexit__(None, None, None)
            await anyio.wait_all_tasks_blocked()
            assert not held.done
            await second.__aexit__(None, None, None)
            await anyio.wait_all_tasks_blocked()
            assert held.done

    run_virtual(main)


# ---- interruption ----------------------------------------------------------------------------------------------------


class Ending:
    """Requests that last until they are told to end; those named ``late`` are not known to the engine for so many seconds."""

    def __init__(self, late: dict[str, float] | None = None) -> None:
        self.gate = RequestGate(self.abort)
        self.late = late or {}
        self.live: dict[str, anyio.Event] = {}
        self.interrupted: dict[str, list[bool]] = {}

    async def abort(self, ids: Sequence[str]) -> None:
        await anyio.lowlevel.checkpoint()
        for name in set(ids) & set(self.live):
            self.live[name].set()

    async def request(self, name: str) -> None:
        async with self.gate.request(name) as passage:
            await anyio.sleep(self.late.get(name, 0.0))
            self.live[name] = anyio.Event()
            await self.live[name].wait()
            self.interrupted.setdefault(name, []).append(passage.interrupted)


def test_interruption_ends_the_live_and_holds_the_new_back() -> None:
    async def main() -> None:
        ending = Ending()
        async with anyio.create_task_group() as tasks:
            for name in "ab":
                tasks.start_soon(ending.request, name)
            await anyio.sleep(1.0)
            async with ending.gate.interrupted():
                assert ending.gate.live == (0, 0)
                tasks.start_soon(ending.request, "c")
                await anyio.sleep(1.0)
                assert set(ending.live) == {"a", "b"}
            await anyio.sleep(1.0)
            assert set(ending.live) == {"a", "b", "c"}
            await ending.abort(["c"])
        assert ending.interrupted == {"a": [True], "b": [True], "c": [False]}

    run_virtual(main, limit_s=10)


def test_interruption_asks_again_for_a_request_that_was_on_its_way() -> None:
    async def main() -> None:
        ending = Ending(late={"a": 1.2})
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ending.request, "a")
            await anyio.wait_all_tasks_blocked()
            async with ending.gate.interrupted():
                assert ending.gate.live == (0, 0)
                assert 1.2 <= anyio.current_time() <= 1.8

    run_virtual(main, limit_s=10)


def test_interruption_does_not_wait_for_ever() -> None:
    """A request the engine never hears of holds no weights in use: the version lands without it."""

    async def main() -> None:
        ending = Ending(late={"a": 100.0})
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ending.request, "a")
            await anyio.wait_all_tasks_blocked()
            async with ending.gate.interrupted():
                assert anyio.current_time() == pytest.approx(PATIENCE_S)
            tasks.cancel_scope.cancel()

    run_virtual(main, limit_s=10)


def test_engine_that_cannot_abort_fails_the_landing() -> None:
    async def refuse(ids: Sequence[str]) -> None:
        raise GenerationError("no such call")

    async def main() -> None:
        gate = RequestGate(refuse)
        async with gate.request("r"):
            with pytest.raises(SyncError, match="could not be interrupted: no such call"):
                await ResumePolicy().land(gate, lambda mode: anyio.sleep(0), version=1)
        await passed(gate)

    run_virtual(main, limit_s=10)


# ---- giving up -------------------------------------------------------------------------------------------------------


def test_groups_past_the_bound_are_given_up_as_wholes_and_the_others_go_on() -> None:
    async def main() -> list[tuple[int, bool, float]]:
        gate, seen = RequestGate(no_engine), list[tuple[int, bool, float]]()

        async def member(version: int) -> None:
            async with gate.request(f"{version}"):
                await anyio.sleep(50.0)

        async def group(version: int) -> None:
            async with gate.group(version, version=version) as passage, anyio.create_task_group() as members:
                members.start_soon(member, version)
                members.start_soon(member, version)
            seen.append((version, passage.given_up, anyio.current_time()))

        async def flip(mode: str) -> None:
            await anyio.sleep(1.0)

        async with anyio.create_task_group() as tasks:
            for version in range(4):
                tasks.start_soon(group, version)
            await anyio.sleep(10.0)
            await CancelPolicy(max_age=2).land(gate, flip, version=4)
        return sorted(seen)

    assert run_virtual(main, limit_s=100) == [(0, True, 11.0), (1, True, 11.0), (2, False, 50.0), (3, False, 50.0)]
