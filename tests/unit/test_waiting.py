"""Bells, waits, and the failure budget."""

import anyio
import pytest

from corrente.common.waiting import Condition, WaitRegistry
from corrente.config import Limits
from corrente.controller.failure_budget import FailureBudget
from corrente.controller.journal import Journal
from corrente.controller.parts import Parts
from corrente.controller.watchdog import watch
from corrente.errors import FailureBudgetError, StallError
from corrente.observe.fanout import Fanout
from corrente.sim.parts import RecordingSink
from corrente.testing import World
from corrente.testing.clock import run_virtual
from corrente.testing.world import build, flow


def test_condition_wakes_every_waiter_whose_condition_holds():
    async def scenario() -> list[str]:
        condition, state, woken = Condition(), {"n": 0}, []

        async def wait_for(n: int) -> None:
            await condition.wait_for(lambda: state["n"] >= n)
            woken.append(n)

        async with anyio.create_task_group() as tasks:
            for n in (2, 1, 3):
                tasks.start_soon(wait_for, n)
            for _ in range(3):
                await anyio.sleep(1)
                state["n"] += 1
                condition.notify_all()
        return woken

    assert run_virtual(scenario) == [1, 2, 3]


def test_waits_adds_up_finished_and_running_waits():
    async def scenario() -> tuple[float, str]:
        waits = WaitRegistry()
        with waits.register_wait("learn", "groups"):
            await anyio.sleep(3)
        with waits.register_wait("learn", "groups"):
            await anyio.sleep(2)
            return waits.total_s("learn", "groups"), waits.describe()

    total, said = run_virtual(scenario)
    assert total == pytest.approx(5)
    assert said == "learn waits for groups (2.0 s)"


def test_watch_names_who_waits_for_what_since_when():
    async def scenario() -> None:
        journal = Journal(Fanout([]))
        with journal.waits.register_wait("learn", "groups"):
            await watch(journal, parts(watchdog_s=60))

    with pytest.raises(StallError, match=r"limits.watchdog_s = 60 s: learn waits for groups \(60.0 s\)"):
        run_virtual(scenario)


def test_watch_is_patient_while_something_moves():
    async def scenario() -> float:
        journal = Journal(Fanout([]))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watch, journal, parts(watchdog_s=10))
            for _ in range(20):
                await anyio.sleep(9)
                journal.moved()
            tasks.cancel_scope.cancel()
        return journal.elapsed_s

    assert run_virtual(scenario) == pytest.approx(180)


def parts(*, watchdog_s: float) -> Parts:
    """An engine and a learner that do nothing."""
    return build(flow(limits=Limits(watchdog_s=watchdog_s)), World()).parts


def fail(budget: FailureBudget, boundary: str, error: str, *, times: int) -> None:
    for _ in range(times):
        budget.attempt(boundary, error)


def test_budget_bears_single_failures_and_ends_systematic_ones():
    budget = FailureBudget(fraction=0.5, window=8)
    for _ in range(50):
        budget.attempt("the engine", "lost")
        budget.attempt("the engine")
    with pytest.raises(FailureBudgetError, match=r"5 of the last 8 attempts failed at the engine; the last: gone"):
        fail(budget, "the engine", "gone", times=8)


def test_budget_gives_up_early_on_a_boundary_that_never_worked():
    budget = FailureBudget(fraction=0.5, window=64)
    with pytest.raises(FailureBudgetError, match=r"16 of the last 16 attempts failed at scoring"):
        fail(budget, "scoring", "reward raised", times=64)


def test_budget_tells_the_first_failure_at_each_boundary():
    sink = RecordingSink()
    budget = FailureBudget(fraction=1.0, window=8, sink=sink)
    for error in ("", "reward raised\nTraceback", "raised again"):
        budget.attempt("scoring", error)
    budget.attempt("the engine", "gone")
    told = [message for level, message in sink.events if level == "warning"]
    assert told == [
        "an episode failed at scoring, the first to do so: reward raised",
        "an episode failed at the engine, the first to do so: gone",
    ]


def test_budget_is_kept_per_boundary():
    budget = FailureBudget(fraction=0.5, window=8)
    for _ in range(100):
        budget.attempt("the environment")
    with pytest.raises(FailureBudgetError, match="at scoring"):
        fail(budget, "scoring", "no", times=8)
