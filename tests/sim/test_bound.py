"""The staleness bound: a theorem in the docs, an assertion in the pipeline, and a table here.

Ages are computed from what the learner was given, not by the pipeline's own arithmetic: version of the step minus version of
the oldest trained token of each group.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from corrente.buffer.base import Occupancy, Ticket
from corrente.common.waiting import Bell
from corrente.controller.parts import Parts
from corrente.data.types import Group, Request
from corrente.errors import LedgerError
from corrente.sim.distributions import Fixed, LogNormal, LongTail, Uniform
from corrente.sim.faults import Fault
from corrente.testing import Simulation, World, simulate
from corrente.testing.world import flow


def bound(*, ahead: int, window: int, per_version: int) -> int:
    """S + ceil((W - 1) / Q), and 0 for S = 0; by counting, without the closed form's integer tricks."""
    overtakes, extra = window - 1, 0
    while overtakes > 0:
        overtakes, extra = overtakes - per_version, extra + 1
    return ahead + extra if ahead else 0


def ages(run: Simulation) -> list[int]:
    assert run.error is None
    assert [step.max_lag for step in run.learner.steps] == [
        max(c.age for c in run.consumed if c.step == step.step) for step in run.learner.steps
    ]
    return [entry.age for entry in run.consumed]


WORLDS = {
    "even": World(),
    "long tail": World(lengths=LongTail(body=LogNormal(median=20, sigma=1.0), factor=10, share=0.1)),
    "slow sync": World(lengths=Uniform(low=1, high=60), stage_s=Fixed(7.0)),
    "slow learner": World(lengths=Uniform(low=1, high=20), step_s=Fixed(9.0)),
    "dropped groups": World(
        lengths=LogNormal(median=20, sigma=1.0),
        reward=None,  # even coins: half of the groups of two have equal rewards and are filtered
        faults=(Fault(stage="generate", probability=0.05), Fault(stage="score", probability=0.05)),
    ),
    "sync that fails": World(
        lengths=LogNormal(median=20, sigma=0.7),
        faults=(Fault(stage="flip", calls=(2, 3, 7)), Fault(stage="stage", calls=(4, 9))),
    ),
}


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_age_never_exceeds_the_bound(ahead: int, window: int, every: int, world: str) -> None:
    if window > 2 * every * (ahead + 1):
        window = 2 * every * (ahead + 1)
    config = flow(steps=12, ahead=ahead, window=window, every=every)
    allowed = bound(ahead=ahead, window=window, per_version=2 * every)
    for schedule in range(2):
        run = simulate(config, WORLDS[world], schedule=schedule)
        assert max(ages(run)) <= allowed
        assert len(run.learner.steps) == 12
        assert [c.version for c in run.consumed] == [c.step // every for c in run.consumed]


@pytest.mark.parametrize(
    ("ahead", "window", "every"),
    [
        (1, 1, 1),
        (1, 2, 1),
        (1, 3, 1),
        (1, 4, 1),
        (2, 1, 1),
        (2, 2, 1),
        (2, 5, 1),
        (2, 6, 1),
        (1, 1, 3),
        (1, 7, 3),
        (2, 8, 3),
    ],
)
def test_bound_is_reached_when_the_last_admitted_group_is_slow(ahead: int, window: int, every: int) -> None:
    """The last group that fits beside version 0 does not end before everything that may overtake it has been trained on."""
    per_version = 2 * every
    slow = per_version * (ahead + 1) - 1

    def lengths(request: Request) -> float:
        return 3000 if request.tokens[1] == slow else 1

    config = flow(steps=6 * every, ahead=ahead, window=window, every=every)
    run = simulate(config, World(lengths=lengths, step_s=Fixed(5.0)))
    allowed = bound(ahead=ahead, window=window, per_version=per_version)
    assert max(ages(run)) == allowed
    oldest = next(c for c in run.consumed if c.prompt_id == f"0/{slow}")
    assert (oldest.oldest, oldest.age) == (0, allowed)


def test_age_counts_the_time_in_the_queue() -> None:
    """Groups finish at once and then wait for a slow learner: their tokens are of version 0, and that is what counts."""
    run = simulate(flow(ahead=2, window=1), World(lengths=Fixed(1), step_s=Fixed(10.0)))
    assert ages(run)[:6] == [0, 0, 1, 1, 2, 2]
    assert max(ages(run)) == 2


def test_age_of_a_sequence_is_that_of_its_oldest_token() -> None:
    """One prompt in ten is still being written when weights land: the group is as old as where it began."""
    run = simulate(flow(steps=20, ahead=2, window=1), World(lengths=LongTail(body=Fixed(20), factor=5, share=0.1)))
    spans = [e for e in run.consumed if e.oldest < e.version]
    assert spans
    assert all(entry.oldest >= entry.admitted_version for entry in run.consumed)
    assert all(entry.age <= entry.version - entry.admitted_version for entry in run.consumed)


@pytest.mark.parametrize("kind", ["none", "double"])
@pytest.mark.parametrize("world", WORLDS)
def test_alternating_is_on_policy_and_double_is_one_behind(kind: str, world: str) -> None:
    from corrente.config import Double, NoBuffer

    config = msgspec.structs.replace(flow(steps=10), buffer=NoBuffer() if kind == "none" else Double())
    run = simulate(config, WORLDS[world])
    assert max(ages(run)) <= (0 if kind == "none" else 1)
    assert len(run.learner.steps) == 10


class CompletionOrder:
    """The same slots, charged and freed at the same moments, but handed out in the order in which groups finish."""

    def __init__(self, slots: int) -> None:
        self._slots, self._next, self._closed = slots, 0, False
        self._generating: set[int] = set()
        self._ready: list[Group] = []
        self._training: set[int] = set()
        self._bell = Bell()

    async def reserve(self) -> Ticket:
        await self._bell.until(lambda: len(self._generating) + len(self._ready) + len(self._training) < self._slots)
        self._generating.add(self._next)
        self._next += 1
        return Ticket(self._next - 1)

    def put(self, group: Group) -> None:
        self._generating.remove(group.id)
        self._ready.append(group)
        self._bell.ring()

    def drop(self, ticket: int) -> None:
        self._generating.discard(ticket)
        self._training.discard(ticket)
        self._bell.ring()

    async def take(self, count: int) -> list[Group]:
        await self._bell.until(lambda: len(self._ready) >= count)
        taken, self._ready = self._ready[:count], self._ready[count:]
        self._training.update(g.id for g in taken)
        return taken

    def release(self, groups: Sequence[int]) -> None:
        self._training.difference_update(groups)
        self._bell.ring()

    def close(self) -> None:
        self._closed = True

    def occupancy(self) -> Occupancy:
        return Occupancy(
            generating=len(self._generating),
            ready=len(self._ready),
            training=len(self._training),
            slots=self._slots,
        )


@pytest.mark.parametrize("steps", [8, 24])
def test_slot_budget_with_completion_order_does_not_bound_age(steps: int) -> None:
    """Same slots, S = 1: one slow group is overtaken for as long as it takes, and its age is the length of the run."""

    def lengths(request: Request) -> float:
        return 25 * steps if request.tokens[1] == 3 else 1

    world = World(lengths=lengths, step_s=Fixed(2.0))
    config = flow(steps=steps + 20, ahead=1, window=1)

    def unbounded(parts: Parts) -> Parts:
        plan = msgspec.structs.replace(parts.plan, max_age=None)
        return msgspec.structs.replace(parts, buffer=CompletionOrder(4), plan=plan)

    assert simulate(config, world, limit_s=1e5, change=unbounded).max_age >= steps
    assert simulate(config, world).max_age == 1


def test_breaking_the_bound_stops_the_run() -> None:
    """The assertion at consumption is live: with a false bound the run ends with LedgerError and not with a wrong gradient."""

    def promise_too_little(parts: Parts) -> Parts:
        return msgspec.structs.replace(parts, plan=msgspec.structs.replace(parts.plan, max_age=1))

    run = simulate(flow(ahead=2), World(lengths=Fixed(1), step_s=Fixed(5.0)), change=promise_too_little)
    assert isinstance(run.error, LedgerError)
    assert "lag" in str(run.error)
    assert max(ages_so_far(run)) == 2  # it was seen, and refused: no step was taken on it
    assert max(step.max_lag for step in run.learner.steps) == 1


def ages_so_far(run: Simulation) -> list[int]:
    return [entry.age for entry in run.consumed]


@pytest.mark.parametrize(("reject", "mask"), [(1, None), (None, 1), (2, 1), (0, None)])
def test_stream_is_bounded_by_version_control_alone(reject: int | None, mask: int | None) -> None:
    config = flow(steps=20, window=None, reject=reject, mask=mask)
    world = World(lengths=LogNormal(median=20, sigma=1.0), step_s=Fixed(2.0))
    run = simulate(config, world)
    assert max(ages(run)) <= min(b for b in (reject, mask) if b is not None)
    assert run.counts["stale"] > 0
    assert run.counts["trained"] == 40
