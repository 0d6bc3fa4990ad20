"""Something goes wrong at every stage, in every way: the run makes progress or ends with a clear error, and never hangs.

A hang would show as TimeoutError at ``limit_s`` of virtual time.
"""

from __future__ import annotations

import anyio
import msgspec
import pytest

from corrente.config import Barrier, Drain, Limits, Recompute, Swap
from corrente.env.base import Generate
from corrente.errors import (
    CheckpointError,
    DivergedError,
    FailureBudgetError,
    StallError,
    SyncError,
    WorkerDied,
)
from corrente.sim.distributions import Fixed, LogNormal
from corrente.sim.faults import Fault
from corrente.testing import Simulation, World, run_virtual, simulate
from corrente.testing.world import build, flow, play
from corrente.types import Prompt, Request, Sampling, Turn

LIMITS = Limits(episode_s=30.0, watchdog_s=100.0, failure_fraction=0.6)
TAIL = LogNormal(median=15, sigma=0.8)

SURVIVED = [
    *(Fault(stage=stage, probability=0.2) for stage in ("generate", "env", "score")),
    *(Fault(stage=stage, kind="hang", probability=0.1) for stage in ("generate", "env", "score")),
    *(Fault(stage=stage, kind="slow", delay_s=5.0, probability=0.3) for stage in ("generate", "env", "score")),
    *(Fault(stage=stage, calls=(1, 2, 5)) for stage in ("stage", "flip", "apply")),
    *(
        Fault(stage=stage, kind="slow", delay_s=60.0, calls=(1, 4))
        for stage in ("stage", "flip", "apply", "step", "save")
    ),
    Fault(stage="sink", calls=(7,)),
    Fault(stage="sink", probability=1.0),
]

FATAL = {
    FailureBudgetError: [
        *(Fault(stage=stage, probability=1.0) for stage in ("generate", "env", "score")),
        *(Fault(stage=stage, kind="hang", probability=1.0) for stage in ("generate", "env", "score")),
    ],
    WorkerDied: [
        Fault(stage=stage, kind="death", calls=(3,))
        for stage in ("generate", "score", "env", "stage", "flip", "apply", "step", "save")
    ],
    SyncError: [Fault(stage=stage, calls=tuple(range(3, 99))) for stage in ("stage", "flip", "apply")],
    StallError: [Fault(stage=stage, kind="hang", calls=(3,)) for stage in ("stage", "flip", "apply", "step", "save")],
    DivergedError: [Fault(stage="step", calls=(3,))],
    CheckpointError: [Fault(stage="save", calls=(3,))],
    OSError: [Fault(stage="prompt", calls=(9,))],
}


def named(value: object) -> str:
    if isinstance(value, type):
        return value.__name__
    if not isinstance(value, Fault):
        return str(value).split(" ")[0]
    fault = value
    return f"{fault.stage}-{fault.kind}" + ("-always" if fault.probability == 1 else "")


def config(**changes):
    return msgspec.structs.replace(
        flow(steps=10, ahead=1, window=2, size=3, limits=LIMITS, **changes),
        checkpoint=msgspec.structs.replace(flow().checkpoint, every=2),
    )


@pytest.mark.parametrize("fault", SURVIVED, ids=named)
@pytest.mark.parametrize("landing", [Swap(), Barrier()], ids=lambda landing: type(landing).__name__)
def test_a_fault_that_passes_costs_no_more_than_what_it_struck(fault: Fault, landing) -> None:
    world = World(lengths=TAIL, faults=(fault,), reward_deadline_s=10.0)
    run = simulate(config(inflight=landing), world, limit_s=20_000)
    assert sum(run.counts.values()) == len(set(run.prompts.given))
    assert len(run.learner.steps) == 10
    trained = [entry.prompt_id for entry in run.consumed]
    assert len(trained) == len(set(trained)) == 20
    if fault.stage in ("stage", "flip", "apply") and fault.kind == "error":
        warnings = [message for _, message in run.sink.events if "trying again" in message]
        assert len(warnings) == 3
        assert all("injected" in message for message in warnings)
    if fault.stage == "sink":
        assert len(run.parts.sink.failed) == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize("landing", [Swap(), Recompute(), Drain(), Barrier()], ids=lambda at: type(at).__name__)
@pytest.mark.parametrize(("kind", "fault"), [(k, f) for k, fs in FATAL.items() for f in fs], ids=named)
def test_a_fault_that_stays_ends_the_run_with_its_name(kind: type[Exception], fault: Fault, landing) -> None:
    world = World(lengths=TAIL, faults=(fault,), reward_deadline_s=10.0)
    run = simulate(config(inflight=landing), world, limit_s=20_000)
    assert type(run.error) is kind
    assert str(run.error)
    if kind not in (StallError, FailureBudgetError):
        assert "injected" in str(run.error) or "died" in str(run.error)


@pytest.mark.parametrize(
    ("fault", "blames"),
    [
        (Fault(stage="step", kind="hang", calls=(3,)), "learn waits for the learner"),
        (Fault(stage="stage", kind="hang", calls=(3,)), "learn waits for staging"),
        (Fault(stage="flip", kind="hang", calls=(3,)), "publish waits for the inflight policy and the flip"),
        (Fault(stage="save", kind="hang", calls=(1,)), "learn waits for the checkpoint"),
    ],
    ids=named,
)
def test_a_stall_says_who_waits_for_what_since_when(fault: Fault, blames: str) -> None:
    run = simulate(config(), World(faults=(fault,)), limit_s=20_000)
    assert isinstance(run.error, StallError)
    assert blames in str(run.error)
    assert "100" in str(run.error)


def test_a_worker_that_dies_ends_the_run_within_a_second() -> None:
    """The engine dies while requests are in flight: that they fail is enough."""

    async def main() -> tuple[Simulation, float]:
        limits = Limits(episode_s=1000.0, watchdog_s=1000.0)
        slow = World(lengths=Fixed(5000), step_s=Fixed(400.0))
        simulation = build(msgspec.structs.replace(config(), limits=limits), slow)

        async def die() -> None:
            await anyio.sleep(130.0)
            simulation.engine.die("killed by SIGKILL; last words: none")  # type: ignore[union-attr]

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(die)
            await play(simulation)
        return simulation, anyio.current_time()

    run, ended_s = run_virtual(main)
    assert isinstance(run.error, WorkerDied)
    assert "last words" in str(run.error)
    assert ended_s < 131.0


class Agents:
    """An environment that asks for three completions at once, from a task group of its own."""

    async def play(self, prompt: Prompt, generate: Generate, *, key: str, group: str, seed: int) -> tuple[Turn, ...]:
        turns = [Turn(speaker="user", tokens=prompt.tokens)]

        async def one(at: int) -> None:
            request = Request(id=f"{key}/{at}", tokens=prompt.tokens, sampling=Sampling(), seed=seed + at)
            done = await generate(request)
            turns.append(Turn(speaker=f"agent {at}", tokens=done.tokens, completion=done, parent=0))

        async with anyio.create_task_group() as tasks:
            for at in range(3):
                tasks.start_soon(one, at)
        return tuple(turns)


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (Fault(stage="generate", kind="death", calls=(20,)), WorkerDied),
        (Fault(stage="generate", probability=1.0), FailureBudgetError),
        (Fault(stage="generate", probability=0.1), None),
    ],
    ids=["death", "always", "sometimes"],
)
def test_errors_inside_an_environments_own_task_group_are_judged_the_same(fault: Fault, kind) -> None:
    async def main() -> Simulation:
        simulation = build(config(), World(lengths=TAIL, faults=(fault,)))
        simulation.parts = msgspec.structs.replace(simulation.parts, env=Agents())
        return await play(simulation)

    run = run_virtual(main, limit_s=20_000)
    assert kind is None or isinstance(run.error, kind), run.error
    if kind is None:
        assert len(run.learner.steps) == 10
        assert all("the engine" in reason for reason in failures(run))
    if kind is FailureBudgetError:
        assert "the engine" in str(run.error)


def failures(run: Simulation) -> list[str]:
    """Reasons of failed groups, as the last checkpoint has them."""
    snapshot, _ = run.checkpoints.read()
    return list(snapshot.ledger.reasons.get("failed", {}))


def test_a_failure_budget_ends_the_run_before_much_is_lost() -> None:
    """Everything works for a while, then the reward function breaks for good."""

    def reward(episode, prompt) -> float:
        return float(episode.index)

    late = tuple(range(30, 100_000))
    run = simulate(config(), World(reward=reward, faults=(Fault(stage="score", calls=late),)), limit_s=20_000)
    assert isinstance(run.error, FailureBudgetError)
    assert "virtual_reward" in str(run.error)
    assert "limits.failure" in str(run.error)
    assert len(run.prompts.given) < 80


def test_an_error_of_the_data_is_the_error_of_the_run() -> None:
    run = simulate(config(), World(faults=(Fault(stage="prompt", calls=(0,)),)), limit_s=1000)
    assert isinstance(run.error, OSError)
    assert run.learner.steps == []
