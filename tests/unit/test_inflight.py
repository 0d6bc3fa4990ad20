"""The valve between pipeline and engine under each landing: who waits for whom, and that nobody waits for ever."""

from __future__ import annotations

import anyio
import pytest

from corrente.errors import SyncError
from corrente.inflight.policies import Barrier, Drain, Recompute, Swap
from corrente.testing import run_virtual
from corrente.testing.expect import pending
from corrente.traffic import Valve


async def passed(valve: Valve) -> None:
    """One request, over as soon as it is let in."""
    async with valve.requests.enter():
        pass


def land(policy, *, entries: list[tuple[float, float]]) -> tuple[float, list[float], str]:
    """Requests that start and last so many seconds, and a landing that begins at 10: when it flipped, when each got in."""

    async def main() -> tuple[float, list[float], str]:
        valve, entered, flips = Valve(), [0.0] * len(entries), []

        async def request(at: int, start_s: float, lasts_s: float) -> None:
            await anyio.sleep(start_s)
            async with valve.groups.enter(), valve.requests.enter():
                entered[at] = anyio.current_time()
                await anyio.sleep(lasts_s)

        async def flip(mode: str) -> None:
            flips.append((anyio.current_time(), mode))
            await anyio.sleep(1.0)

        async with anyio.create_task_group() as tasks:
            for at, (start_s, lasts_s) in enumerate(entries):
                tasks.start_soon(request, at, start_s, lasts_s)
            await anyio.sleep(10.0)
            await policy.land(valve, flip)
        assert valve.requests.live == valve.groups.live == 0
        return flips[0][0], entered, flips[0][1]

    return run_virtual(main, limit_s=1000)


def test_swap_and_recompute_flip_at_once() -> None:
    entries = [(0.0, 50.0), (10.5, 1.0)]
    assert land(Swap(), entries=entries) == (10.0, [0.0, 10.5], "swap")
    assert land(Recompute(), entries=entries) == (10.0, [0.0, 10.5], "recompute")


@pytest.mark.parametrize("policy", [Drain(), Barrier()])
def test_drain_and_barrier_wait_for_the_live_and_hold_back_the_new(policy) -> None:
    at_s, entered, mode = land(policy, entries=[(0.0, 50.0), (5.0, 10.0), (12.0, 1.0), (70.0, 1.0)])
    assert (at_s, mode) == (50.0, "swap")
    assert entered == [0.0, 5.0, 51.0, 70.0]


def test_a_failed_or_cancelled_landing_lets_the_held_in() -> None:
    async def main() -> None:
        for policy in (Drain(), Barrier()):
            valve = Valve()

            async def fail(mode: str) -> None:
                raise SyncError("no")

            with pytest.raises(SyncError):
                await policy.land(valve, fail)
            async with valve.groups.enter(), valve.requests.enter():
                pass
            live = valve.requests.enter() if isinstance(policy, Drain) else valve.groups.enter()
            await live.__aenter__()
            async with pending(lambda policy=policy, valve=valve: policy.land(valve, fail)) as landing:
                assert not landing.done
                await landing.cancel()
            async with valve.groups.enter(), valve.requests.enter():
                pass
            await live.__aexit__(None, None, None)

    run_virtual(main)


def test_cancelling_a_held_request_leaves_no_trace() -> None:
    async def main() -> None:
        valve = Valve()
        async with valve.requests.quiet():
            async with pending(lambda: passed(valve)) as held:
                assert not held.done
                await held.cancel()
            assert valve.requests.live == 0
        async with valve.requests.enter():
            assert valve.requests.live == 1

    run_virtual(main)


def test_two_holders_hold_until_both_let_go() -> None:
    async def main() -> None:
        valve = Valve()
        first, second = valve.requests.quiet(), valve.requests.quiet()
        await first.__aenter__()
        await second.__aenter__()
        async with pending(lambda: passed(valve)) as held:
            await first.__aexit__(None, None, None)
            await anyio.wait_all_tasks_blocked()
            assert not held.done
            await second.__aexit__(None, None, None)
            await anyio.wait_all_tasks_blocked()
            assert held.done

    run_virtual(main)
