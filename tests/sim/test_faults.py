"""Something goes wrong at every stage, in every way: the run makes progress or ends with a clear error, and never hangs.

A hang would show as TimeoutError at ``limit_s`` of virtual time.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import Any

import anyio
import msgspec
import pytest

from corrente.config import Filter, Limits
from corrente.controller.parts import Parts
from corrente.data.types import Prompt
from corrente.env.base import Env, Generate, PlayedEpisode
from corrente.errors import (
    CheckpointError,
    DivergedError,
    FailureBudgetError,
    NothingToLearnError,
    StallError,
    SyncError,
    WorkerDied,
)
from corrente.sim.distributions import Fixed, LogNormal
from corrente.sim.faults import Fault
from corrente.sim.speed import Speed
from corrente.testing import Simulation, World, run_virtual, samples, simulate
from corrente.testing.world import LANDINGS, build, flow, play

LIMITS = Limits(episode_s=30.0, watchdog_s=100.0, failure_fraction=0.6)
TAIL = LogNormal(median=15, sigma=0.8)

SURVIVED = [
    *(Fault(stage=stage, probability=0.2) for stage in ("generate", "env", "score")),
    *(Fault(stage=stage, kind="hang", probability=0.1) for stage in ("generate", "env", "score")),
    *(Fault(stage=stage, kind="slow", delay_s=5.0, probability=0.3) for stage in ("generate", "env", "score")),
    *(Fault(stage=stage, calls=(1, 2, 5)) for stage in ("export", "deliver", "flip", "apply", "receive")),
    *(Fault(stage="partials", kind=kind, probability=1.0) for kind in ("error", "hang")),
    *(
        Fault(stage=stage, kind="slow", delay_s=60.0, calls=(1, 4))
        for stage in ("export", "deliver", "flip", "apply", "step", "save")
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
        for stage in ("generate", "score", "env", "export", "deliver", "flip", "apply", "step", "save")
    ],
    SyncError: [Fault(stage=stage, calls=tuple(range(3, 99))) for stage in ("export", "deliver", "flip", "apply")],
    StallError: [
        Fault(stage=stage, kind="hang", calls=(3,)) for stage in ("export", "deliver", "flip", "apply", "step", "save")
    ],
    DivergedError: [Fault(stage="step", calls=(3,))],
    CheckpointError: [Fault(stage="save", calls=(3,))],
    OSError: [Fault(stage="prompt", calls=(9,))],
}


def named(value: object) -> str:
    if isinstance(value, type):
        return value.__name__
    if not isinstance(value, Fault):
        return type(value).__name__
    fault = value
    return f"{fault.stage}-{fault.kind}" + ("-always" if fault.probability == 1 else "")


def config(**changes):
    return msgspec.structs.replace(
        flow(steps=10, ahead=1, window=2, size=3, limits=LIMITS, **changes),
        checkpoint=msgspec.structs.replace(flow().checkpoint, every=2),
    )


def each_with(faults: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Every fault under every landing; all but one landing of each, in turn, are slow."""
    return [
        pytest.param(*fault, landing, marks=[] if at % len(LANDINGS) == number else pytest.mark.slow)
        for at, fault in enumerate(faults)
        for number, landing in enumerate(LANDINGS)
    ]


@pytest.mark.parametrize(("fault", "landing"), each_with([(fault,) for fault in SURVIVED]), ids=named)
def test_fault_that_passes_costs_no_more_than_what_it_struck(fault: Fault, landing) -> None:
    world = World(lengths=TAIL, faults=(fault,), reward_deadline_s=10.0)
    run = simulate(config(inflight=landing), world, limit_s=20_000)
    assert sum(run.counts.values()) == len(set(run.prompts.given))
    assert len(run.learner.steps) == 10
    trained = [entry.prompt_id for entry in run.consumed]
    assert len(trained) == len(set(trained)) == 20
    if fault.stage in ("export", "deliver", "flip", "apply", "receive") and fault.kind == "error":
        warnings = [message for _, message in run.sink.events if "trying again" in message]
        assert len(warnings) == 3
        assert all("injected" in message for message in warnings)
    if fault.stage == "sink":
        assert len(run.parts.sink.failed) == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("kind", "fault", "landing"), each_with([(k, f) for k, fs in FATAL.items() for f in fs]), ids=named
)
def test_fault_that_stays_ends_the_run_with_its_name(kind: type[Exception], fault: Fault, landing) -> None:
    world = World(lengths=TAIL, faults=(fault,), reward_deadline_s=10.0)
    run = simulate(config(inflight=landing), world, limit_s=20_000)
    assert type(run.error) is kind
    assert str(run.error)
    if kind not in (StallError, FailureBudgetError):
        assert any(word in str(run.error) for word in ("injected", "died", "is dead"))


@pytest.mark.parametrize(
    ("fault", "blames"),
    [
        (Fault(stage="step", kind="hang", calls=(3,)), "learn waits for the learner"),
        (Fault(stage="deliver", kind="hang", calls=(3,)), "publish waits for delivery"),
        (Fault(stage="flip", kind="hang", calls=(3,)), "publish waits for the inflight policy and the flip"),
        (Fault(stage="save", kind="hang", calls=(1,)), "learn waits for the checkpoint"),
    ],
    ids=named,
)
def test_stall_says_who_waits_for_what_since_when(fault: Fault, blames: str) -> None:
    run = simulate(config(), World(faults=(fault,)), limit_s=20_000)
    assert isinstance(run.error, StallError)
    assert blames in str(run.error)
    assert "100" in str(run.error)


@pytest.mark.parametrize(
    "world",
    [
        World(step_s=Fixed(400.0)),
        World(lengths=Fixed(2048), speed=Speed(step_s=0.25, per_sequence_s=0.0)),
        World(lengths=Fixed(2048), speed=Speed(step_s=0.25, per_sequence_s=0.0), engines=2, step_s=Fixed(400.0)),
    ],
    ids=["a long step", "long completions", "both"],
)
def test_work_that_takes_longer_than_the_watchdogs_patience_is_no_stall(world: World) -> None:
    limits = Limits(episode_s=10_000.0, watchdog_s=100.0)
    run = simulate(msgspec.structs.replace(config(), limits=limits), world, limit_s=100_000)
    assert run.error is None
    assert len(run.learner.steps) == 10


@pytest.mark.parametrize("stage", ["step", "apply"])
def test_hang_is_found_within_the_watchdogs_patience_of_the_last_that_moved(stage: str) -> None:
    """Of an engine, of which the learner soon waits; of the learner, on which the engine soon waits."""
    world = World(step_s=Fixed(400.0), faults=(Fault(stage=stage, kind="hang", calls=(2,)),))
    run = simulate(msgspec.structs.replace(config(), limits=Limits(watchdog_s=100.0)), world, limit_s=100_000)
    assert isinstance(run.error, StallError)
    ended = [stop for _, _, _, stop in run.sink.spans]
    assert run.elapsed_s <= max(ended) + 100.0


def test_worker_that_dies_ends_the_run_within_a_second() -> None:
    """The engine dies while requests are in flight: that they fail is enough."""

    async def main() -> tuple[Simulation, float]:
        limits = Limits(episode_s=1000.0, watchdog_s=1000.0)
        slow = World(lengths=Fixed(5000), step_s=Fixed(400.0))
        simulation = build(msgspec.structs.replace(config(), limits=limits), slow)

        async def die() -> None:
            await anyio.sleep(130.0)
            simulation.engine.die("killed by SIGKILL; last output: none")  # type: ignore[union-attr]

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(die)
            await play(simulation)
        return simulation, anyio.current_time()

    run, ended_s = run_virtual(main)
    assert isinstance(run.error, WorkerDied)
    assert "last output" in str(run.error)
    assert ended_s < 131.0


def in_env(env: Env) -> Callable[[Parts], Parts]:
    """A ``change`` for ``simulate`` that plays in ``env``."""
    return lambda parts: msgspec.structs.replace(parts, env=env)


class Agents:
    """An environment that asks for three completions at once, from a task group of its own."""

    async def play(self, prompt: Prompt, generate: Generate, *, key: str, group: str, seed: int) -> PlayedEpisode:
        turns = [samples.turn(prompt.tokens)]

        async def one(at: int) -> None:
            done = await generate(samples.request(id=f"{key}/{at}", tokens=prompt.tokens, seed=seed + at))
            turns.append(samples.turn(done, speaker=f"agent {at}", parent=0))

        async with anyio.create_task_group() as tasks:
            for at in range(3):
                tasks.start_soon(one, at)
        return PlayedEpisode(turns=tuple(turns))


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
    run = simulate(config(), World(lengths=TAIL, faults=(fault,)), limit_s=20_000, change=in_env(Agents()))
    assert kind is None or isinstance(run.error, kind), run.error
    if kind is None:
        assert len(run.learner.steps) == 10
        assert all("the engine" in reason for reason in failures(run))
    if kind is FailureBudgetError:
        assert "the engine" in str(run.error)


class Earns:
    """Gives what it is told for some episodes, and 1 or 0 for the others."""

    def __init__(self, given: object) -> None:
        self._given = given

    async def play(self, prompt: Prompt, generate: Generate, *, key: str, group: str, seed: int) -> PlayedEpisode:
        done = await generate(samples.request(id=f"{key}/0", tokens=prompt.tokens, seed=seed))
        reward: Any = self._given if seed % 5 == 0 else float(seed % 2)
        return PlayedEpisode(turns=(samples.turn(prompt.tokens), samples.turn(done)), rewards={"env": reward})


@pytest.mark.parametrize("given", [math.nan, math.inf, "many", 1e39])
def test_reward_of_an_environment_that_is_no_number_costs_its_episode(given: object) -> None:
    run = simulate(config(), World(lengths=TAIL), limit_s=20_000, change=in_env(Earns(given)))
    assert run.error is None
    assert len(run.learner.steps) == 10
    assert any("the environment gave the reward" in message for _, message in run.sink.events)
    assert all(math.isfinite(values["reward/mean"]) for _, values in run.sink.rows if "reward/mean" in values)


def failures(run: Simulation) -> list[str]:
    """Reasons of failed groups, as the last checkpoint has them."""
    snapshot, _ = run.checkpoints.read()
    return list(snapshot.ledger.reasons.get("failed", {}))


def test_failure_budget_ends_the_run_before_much_is_lost() -> None:
    """Everything works for a while, then the reward function breaks for good."""

    def reward(episode, prompt) -> float:
        return float(episode.index)

    late = tuple(range(30, 100_000))
    run = simulate(config(), World(reward=reward, faults=(Fault(stage="score", calls=late),)), limit_s=20_000)
    assert isinstance(run.error, FailureBudgetError)
    assert "virtual_reward" in str(run.error)
    assert "limits.failure" in str(run.error)
    assert len(run.prompts.given) < 80


def test_error_of_the_data_is_the_error_of_the_run() -> None:
    run = simulate(config(), World(faults=(Fault(stage="prompt", calls=(0,)),)), limit_s=1000)
    assert isinstance(run.error, OSError)
    assert run.learner.steps == []


def test_prompts_that_are_refused_at_once_do_not_end_a_healthy_run() -> None:
    """All episodes of two of the first sixteen groups fail before any other has ended."""
    faults = tuple(Fault(stage="generate", key=f"{ticket}/*") for ticket in (3, 9))
    run = simulate(flow(steps=3, prompts=8, size=8, ahead=1, window=1), World(faults=faults))
    assert run.counts["failed"] == 2
    assert len(run.learner.steps) == 3


def test_refusals_in_a_row_as_many_as_there_are_places_do_not_either() -> None:
    """Each makes room for the next, before the first good episode ends."""
    faults = tuple(Fault(stage="generate", key=f"{ticket}/*") for ticket in range(20))
    run = simulate(flow(steps=10, prompts=8, size=8, ahead=1, window=0), World(faults=faults))
    assert run.error is None
    assert run.counts["failed"] == 20
    assert len(run.learner.steps) == 10


def test_groups_that_lose_too_many_episodes_to_be_learned_from_end_the_run() -> None:
    """One of two episodes always fails: not more than half of what is attempted, and no group is ever trainable."""
    fault = Fault(stage="generate", key="*/0/0")
    run = simulate(flow(steps=3, size=2), World(faults=(fault,)), limit_s=5000)
    assert isinstance(run.error, NothingToLearnError)
    assert "injected" in str(run.error)


@pytest.mark.parametrize(
    ("speed", "length", "episode_s"),
    [
        (Speed(step_s=0.1, per_sequence_s=0, prefill_token_s=0.5), 2, 20.0),
        (Speed(step_s=1.0, per_sequence_s=0), 2, 4.0),
    ],
    ids=["prefill", "slow tokens"],
)
def test_nor_is_one_at_an_engine_that_takes_long_for_a_token(speed: Speed, length: int, episode_s: float) -> None:
    """Each request fits well into its deadline, and is mostly of prefill, or of tokens rarer than the looks at it."""
    limits = Limits(episode_s=episode_s, failure_fraction=1.0)
    config = flow(steps=4, prompts=2, size=4, limits=limits, filter=Filter(zero_variance="keep"))
    run = simulate(config, World(lengths=Fixed(length), speed=speed, max_sequences=1, rows=8))
    assert run.error is None
    assert run.counts["failed"] == 0


def test_queue_at_the_engine_is_not_counted_against_an_episode() -> None:
    """Nothing is wrong, and the last of the queue is served long after limits.episode_s."""
    world = World(lengths=Fixed(100), max_sequences=4)
    run = simulate(flow(steps=3, prompts=8, size=8, limits=Limits(episode_s=30.0)), world)
    assert run.counts["failed"] == 0
    assert len(run.learner.steps) == 3


@pytest.mark.parametrize(("stage", "blamed"), [("env", "the environment"), ("generate", "the engine")])
def test_deadline_is_charged_to_who_was_waited_for(stage: Any, blamed: str) -> None:
    fault = Fault(stage=stage, kind="hang", probability=1.0)
    run = simulate(flow(steps=3, limits=Limits(episode_s=5.0)), World(faults=(fault,)))
    assert isinstance(run.error, FailureBudgetError)
    assert f"failed at {blamed}" in str(run.error)


class Wrapped(Agents):
    """An environment whose outcome is changed by ``change``."""

    def __init__(self, change: Any) -> None:
        self._change = change

    async def play(self, prompt: Prompt, generate: Generate, *, key: str, group: str, seed: int) -> PlayedEpisode:
        return self._change(await super().play(prompt, generate, key=key, group=group, seed=seed))


def changed(change: Any, **world: Any) -> Simulation:
    return simulate(flow(steps=3), World(**world), limit_s=1000, change=in_env(Wrapped(change)))


async def refuses() -> None:
    raise OSError("no such container")


@pytest.mark.parametrize(
    ("what", "told"),
    [({"release": refuses}, "no such container"), ({"metrics": {"env/won": "yes", "env/turns": 3}}, "env/won")],
    ids=["release", "metrics"],
)
def test_fault_beside_an_episode_is_told_once_and_costs_nothing(what: dict[str, Any], told: str) -> None:
    run = changed(lambda played: msgspec.structs.replace(played, **what))
    assert run.counts["failed"] == 0
    assert len([message for _, message in run.sink.events if told in message]) == 1
    if "metrics" in what:
        assert run.sink.rows[0][1]["env/turns"] == 3.0


def test_numbers_that_engine_and_scorer_do_not_give_are_told_once_and_missing() -> None:
    async def main() -> Simulation:
        simulation = build(flow(steps=3), World())

        def broken(*_: object) -> Any:
            raise ValueError("no numbers today")

        simulation.engine.stats = simulation.parts.scorer.stats = broken  # type: ignore[method-assign]
        return await play(simulation)

    run = run_virtual(main)
    assert len(run.learner.steps) == 3
    told = [message for _, message in run.sink.events if "no numbers today" in message]
    assert [message.split(":")[0] for message in told] == ["no numbers of the engine", "no numbers of the scorer"]
    assert "groups/trained" in run.sink.rows[-1][1]


def test_error_of_the_data_comes_after_a_checkpoint() -> None:
    run = simulate(flow(steps=10), World(faults=(Fault(stage="prompt", calls=(9,)),)))
    assert isinstance(run.error, OSError)
    snapshot, state = run.checkpoints.read()
    assert snapshot.step == state == len(run.learner.steps) > 0


def test_error_of_generation_while_the_last_step_runs_is_told_and_no_failure() -> None:
    world = World(step_s=Fixed(10.0), faults=(Fault(stage="prompt", calls=(4,)),))
    run = simulate(flow(steps=1, prompts=2), world)
    assert run.outcome is not None
    assert run.outcome.ended == "steps"


@pytest.mark.parametrize("raised", [SystemExit(0), asyncio.CancelledError()], ids=["exit", "cancelled"])
def test_environment_that_raises_to_end_its_process_or_task_costs_its_episode(raised: BaseException) -> None:
    def ends(played: PlayedEpisode) -> PlayedEpisode:
        raise raised

    async def main() -> Simulation:
        world = World(speed=Speed(step_s=1e-4, per_sequence_s=0.0))
        return await play(build(flow(steps=3), world, change=in_env(Wrapped(ends))))

    run = anyio.run(main, backend="asyncio")
    assert isinstance(run.error, FailureBudgetError)
    assert f"ended by {type(raised).__name__}" in str(run.error)


@pytest.mark.parametrize("probability", [0.1, 0.2])
@pytest.mark.parametrize("ahead", [0, 1])
def test_environment_that_never_answers_costs_its_episode_also_without_a_deadline(
    ahead: int, probability: float
) -> None:
    limits = Limits(episode_s=1e9, watchdog_s=100.0, failure_fraction=0.6)
    plan = flow(steps=10, ahead=ahead, window=2, size=3, limits=limits)
    hangs = Fault(stage="env", kind="hang", probability=probability)
    run = simulate(plan, World(lengths=TAIL, faults=(hangs,), eval_rows=3), limit_s=20_000)
    assert run.error is None
    assert len(run.learner.steps) == 10
    lost = [message for _, message in run.sink.events if "the environment had not answered" in message]
    assert lost
    assert "limits.watchdog_s = 100" in lost[0]


def test_environment_that_answers_late_is_left_in_peace_while_others_move() -> None:
    """One episode takes twice the watchdog's patience."""
    limits = Limits(episode_s=1e9, watchdog_s=100.0)
    late = Fault(stage="env", kind="slow", delay_s=200.0, calls=(2,))
    plan = flow(steps=40, ahead=2, window=4, size=2, limits=limits)
    run = simulate(plan, World(lengths=Fixed(200), step_s=Fixed(60.0), faults=(late,)), limit_s=20_000)
    assert run.error is None
    assert sum(run.counts[outcome] for outcome in ("failed", "stale")) == 0
    assert not [message for _, message in run.sink.events if "had not answered" in message]
