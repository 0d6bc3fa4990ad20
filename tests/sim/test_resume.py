"""Stop, kill and resume: together the parts of a run train each prompt once, in the order and within the age of a whole run."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import Phase, given, seed, settings
from hypothesis import strategies as st

from corrente.config import Cancel, Checkpoint, Filter, Limits, RunConfig
from corrente.controller.snapshot import Snapshot
from corrente.data.types import Request
from corrente.errors import NothingToLearnError
from corrente.sim.distributions import Fixed, LogNormal, LongTail, Uniform
from corrente.sim.faults import Fault
from corrente.staleness import gate
from corrente.testing import Simulation, World, simulate
from corrente.testing.world import LANDINGS, flow

TAIL = LongTail(body=LogNormal(median=15, sigma=0.8), factor=8, share=0.1)


def checkpointed(saves: int, **numbers) -> RunConfig:
    config = flow(limits=Limits(episode_s=100.0), **numbers)
    return msgspec.structs.replace(config, checkpoint=Checkpoint(every=saves))


def taught_nothing(parts: Sequence[Simulation]) -> bool:
    """The data ended, and by chance the rewards of each of its groups were equal: rightly an error."""
    nothing = isinstance(parts[-1].error, NothingToLearnError) and "the data ended" in str(parts[-1].error)
    return nothing and not any(part.consumed for part in parts)


def run_in_parts(
    config: RunConfig, world: World, *, kills_s: Sequence[float] = (), stops_s: Sequence[float] = ()
) -> list[Simulation]:
    """Run, kill or stop after so many seconds, go on from the newest checkpoint, ...; the last part runs to its end."""
    parts: list[Simulation] = []
    resume: tuple[Snapshot, int] | None = None
    cuts = [("kill", s) for s in kills_s] + [("stop", s) for s in stops_s] + [("", 0.0)]
    for number, (how, at_s) in enumerate(cuts):
        part = simulate(
            config,
            world,
            resume=resume,
            kill_at_s=at_s if how == "kill" else None,
            stop_at_s=at_s if how == "stop" else None,
            schedule=number,
            limit_s=100_000,
        )
        parts.append(part)
        assert part.error is None or taught_nothing(parts)
        if part.checkpoints.written:
            resume = part.checkpoints.read()
            promise = part.parts.inflight.one_version
            again = list(zip(resume[0].admit_again(part.parts.plan, promise), resume[0].unfinished, strict=True))
            assert all(a.group is b.group for a, b in again)  # nothing finished is generated twice
            assert promise or gate.window(config) > 1 or all(a.answers is b.answers for a, b in again)  # nor begun
    return parts


def kept(parts: Sequence[Simulation]) -> list:
    """What was trained on and not lost by a kill: of each part, the steps up to the checkpoint the next one began with."""
    out = []
    for part in parts:
        last = part is parts[-1]
        ends = math.inf if last else part.checkpoints.read()[0].step if part.checkpoints.written else -math.inf
        out += [entry for entry in part.consumed if entry.step < ends]
    return out


def check(config: RunConfig, parts: Sequence[Simulation], *, rows: int | None = None) -> None:
    entries = kept(parts)
    trained = [entry.prompt_id for entry in entries]
    assert len(trained) == len(set(trained))
    tickets = [entry.group for entry in entries]
    assert len(tickets) == len(set(tickets))
    steps = [entry.step for entry in entries]
    assert steps == sorted(steps)
    assert set(steps) == set(range(max(steps, default=-1) + 1))
    counts = parts[-1].counts
    assert counts["trained"] == len(trained)
    allowed = gate.max_age(config)
    assert allowed is None or max((entry.age for entry in entries), default=0) <= allowed
    if rows is not None:
        assert sum(counts.values()) == rows
        assert counts["cancelled"] == 0 or isinstance(config.inflight, Cancel)  # which gives up what a flip finds
    assert parts[-1].learner.state == len(set(steps))


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("at_s", [0.05, 2.0, 9.0, 17.3, 40.0])
def test_killed_run_trains_every_prompt_once(every: int, window: int, at_s: float) -> None:
    config = checkpointed(every, steps=1000, ahead=1, window=window, every=every)
    world = World(lengths=TAIL, rows=31)
    parts = run_in_parts(config, world, kills_s=[at_s, at_s / 2, at_s])
    check(config, parts, rows=31)
    assert {entry.prompt_id for entry in kept(parts)} == {f"0/{row}" for row in range(31)}


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("at_s", [0.0, 1.0, 7.7, 15.2])
def test_stopped_run_goes_on_where_it_stood(every: int, at_s: float) -> None:
    config = checkpointed(0, steps=60, ahead=2, window=2, every=every)
    parts = run_in_parts(config, World(lengths=TAIL), stops_s=[at_s, 0.0, at_s, 3.0])
    check(config, parts)
    assert all(part.outcome is not None for part in parts)
    assert parts[-1].outcome is not None
    assert parts[-1].outcome.steps == 60
    assert [part.outcome.ended for part in parts if part.outcome] == ["stopped"] * 4 + ["steps"]


def test_finished_groups_are_kept_and_unfinished_ones_generated_again() -> None:
    """The checkpoint holds finished groups as they are; nothing that was paid for is generated twice."""
    config = checkpointed(1, steps=100, ahead=2, window=1)

    def lengths(request: Request) -> float:
        return 400 if request.tokens[1] == 4 else 2

    world = World(lengths=lengths, rows=12, step_s=Fixed(1.0))
    first = simulate(config, world, kill_at_s=5.0)
    snapshot, _ = first.checkpoints.read()
    finished = [u.prompt_id for u in snapshot.unfinished if u.group is not None]
    assert "0/4" in {u.prompt_id for u in snapshot.unfinished if u.group is None}
    assert len(finished) >= 3
    second = simulate(config, world, resume=first.checkpoints.read())
    check(config, [first, second], rows=12)
    generated = {name.split()[1] for track, name, *_ in second.sink.spans if track == "generate"}
    carried = {entry.group for entry in second.consumed if entry.prompt_id in finished}
    assert len(carried) == len(finished)
    assert not {str(ticket) for ticket in carried} & generated


def test_resuming_after_the_last_step_takes_no_further_step() -> None:
    config = checkpointed(2, steps=6)
    first = simulate(config, World(lengths=TAIL))
    again = simulate(config, World(lengths=TAIL), resume=first.checkpoints.read())
    assert again.outcome is not None
    assert (again.outcome.ended, again.outcome.steps) == ("steps", 6)
    assert again.consumed == []
    longer = msgspec.structs.replace(config, run=msgspec.structs.replace(config.run, steps=12))
    more = simulate(longer, World(lengths=TAIL), resume=again.checkpoints.read())
    check(longer, [first, more])
    assert len({entry.prompt_id for entry in first.consumed + more.consumed}) == 24


def test_resuming_with_fewer_slots_than_unfinished_prompts_loses_none_and_keeps_the_new_bound() -> None:
    config = checkpointed(1, steps=1000, ahead=3, window=1)
    world = World(lengths=TAIL, rows=40)
    first = simulate(config, world, kill_at_s=12.0)
    assert len(first.checkpoints.read()[0].unfinished) > 2
    narrow = msgspec.structs.replace(config, staleness=msgspec.structs.replace(config.staleness, max=0))
    second = simulate(narrow, world, resume=first.checkpoints.read(), kill_at_s=1.0)
    resume = second.checkpoints.read() if second.checkpoints.written else first.checkpoints.read()
    stopped = simulate(narrow, world, resume=resume, stop_at_s=0.0)
    last = simulate(narrow, world, resume=stopped.checkpoints.read())
    entries = [e for e in first.consumed if e.step < first.checkpoints.read()[0].step]
    if second.checkpoints.written:
        entries += [e for e in second.consumed if e.step < resume[0].step]
    entries += stopped.consumed + last.consumed
    assert sorted(e.prompt_id for e in entries) == sorted(f"0/{row}" for row in range(40))
    assert sum(last.counts.values()) == 40
    assert max(e.age for e in first.consumed) > 0
    assert max(e.age for run in (second, stopped, last) for e in run.consumed) == 0


def test_elapsed_time_and_versions_go_on() -> None:
    config = checkpointed(1, steps=8)
    first = simulate(config, World(), stop_at_s=6.0)
    second = simulate(config, World(), resume=first.checkpoints.read())
    assert first.outcome is not None
    assert second.outcome is not None
    assert second.outcome.elapsed_s == pytest.approx(first.elapsed_s + second.elapsed_s)
    rows = [values for sink in (first.sink, second.sink) for _, values in sink.rows if "version/learner" in values]
    assert [row["version/learner"] for row in rows] == [float(version) for version in range(1, 9)]
    times = [row["time/elapsed_s"] for row in rows]
    assert times == sorted(times)


@st.composite
def broken_runs(draw: st.DrawFn) -> tuple[RunConfig, World, list[float], list[float]]:
    prompts, every, ahead = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(0, 2))
    slots = (ahead + 1) * prompts * every
    config = checkpointed(
        every * draw(st.integers(1, 2)),
        steps=every * draw(st.integers(1, 12)),
        prompts=prompts,
        ahead=ahead,
        window=draw(st.integers(0, slots)),
        every=every,
        inflight=draw(st.sampled_from(LANDINGS)),
        seed=draw(st.integers(0, 99)),
        filter=Filter(patience=1000),  # rewards are coins: by chance many groups in a row may teach nothing
    )
    world = World(
        lengths=draw(st.sampled_from([TAIL, Fixed(5), Uniform(low=0, high=50)])),
        step_s=draw(st.sampled_from([Fixed(0.0), Fixed(0.3), Uniform(low=0.1, high=5)])),
        export_s=draw(st.sampled_from([Fixed(0.0), Fixed(0.5)])),
        deliver_s=draw(st.sampled_from([Fixed(0.0), Fixed(2.0), Fixed(9.0)])),
        shared=draw(st.booleans()),
        score_s=Uniform(low=0, high=draw(st.sampled_from([0.0, 4.0]))),
        rows=draw(st.sampled_from([0, 3, 20])),
        epochs=draw(st.integers(1, 2)),
        reward=None if draw(st.booleans()) else World().reward,
        faults=draw(st.sampled_from([(), (Fault(stage="generate", probability=0.1),)])),
    )
    times = st.lists(st.floats(0, 40), max_size=3)
    return config, world, draw(times), draw(times)


def every_prompt_is_trained_once(broken: tuple[RunConfig, World, list[float], list[float]]) -> None:
    config, world, kills_s, stops_s = broken
    parts = run_in_parts(config, world, kills_s=kills_s, stops_s=stops_s)
    if taught_nothing(parts):
        return
    ended = parts[-1].outcome.ended if parts[-1].outcome else ""
    check(config, parts, rows=world.rows * world.epochs if ended == "data" else None)


@pytest.mark.parametrize("block", range(12))
def test_any_run_in_parts_trains_every_prompt_once(block: int) -> None:
    seed(block)(settings(max_examples=2, phases=[Phase.generate])(given(broken_runs())(every_prompt_is_trained_once)))()


@pytest.mark.slow
def test_many_runs_in_parts_train_every_prompt_once() -> None:
    seed(1000)(settings(max_examples=120)(given(broken_runs())(every_prompt_is_trained_once)))()


def test_groups_in_a_row_that_teach_nothing_are_counted_on() -> None:
    """A run that is stopped again and again has no more patience than one that is not."""
    config = checkpointed(0, steps=100, filter=Filter(patience=10))
    world = World(lengths=TAIL, reward=lambda episode, prompt: 1.0)
    first = simulate(config, world, stop_at_s=10.0)
    snapshot, _ = first.checkpoints.read()
    assert 0 < snapshot.untrainable[0] < 20
    second = simulate(config, world, resume=first.checkpoints.read())
    assert isinstance(second.error, NothingToLearnError)
    ended, _ = second.checkpoints.read()
    assert ended.ledger.outcomes["filtered"] == 20
    assert ended.untrainable == (0, 0)


@pytest.mark.parametrize("rows", [1, 3, 5])
@pytest.mark.parametrize(("every", "prompts"), [(2, 1), (3, 1), (2, 3)])
def test_data_that_ends_within_a_version_may_be_gone_on_with_in_more_epochs(
    every: int, prompts: int, rows: int
) -> None:
    config = flow(steps=60, prompts=prompts, ahead=1, window=1, every=every)
    world = World(rows=rows, epochs=1, lengths=Fixed(5), step_s=Fixed(3.0))
    first = simulate(config, world)
    assert first.outcome is not None
    assert first.outcome.ended == "data"
    more = simulate(config, msgspec.structs.replace(world, epochs=6), resume=first.checkpoints.read())
    assert more.error is None
    assert more.outcome is not None
    assert more.outcome.counts["trained"] == 6 * rows
    assert max(entry.age for entry in more.consumed) <= 1


def test_failures_near_the_end_of_the_data_are_judged_with_those_before_a_resume() -> None:
    config = checkpointed(1, steps=100, prompts=1, size=2, ahead=0, window=1)
    world = World(rows=20, faults=(Fault(stage="env", key="18/*"), Fault(stage="env", key="19/*")))
    whole = simulate(config, world)
    for part in (-3, -2, -1):
        rest = simulate(config, world, resume=whole.checkpoints.read(part))
        assert rest.error is None
        assert rest.outcome is not None
        assert rest.outcome.counts == {"trained": 18, "filtered": 0, "failed": 2, "stale": 0, "cancelled": 0}
