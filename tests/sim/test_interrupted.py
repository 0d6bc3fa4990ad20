"""Completions that are interrupted, given up, carried over a restart or finished under older weights: what becomes of tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import anyio
import msgspec
import pytest
from tests.sim.wrapped_env import wrap_env

from corrente.config import (
    Barrier,
    Cancel,
    Checkpoint,
    Drain,
    Eval,
    Filter,
    Limits,
    OldWeights,
    Resume,
    RunConfig,
    Swap,
)
from corrente.controller.parts import Parts
from corrente.controller.snapshot import Unfinished
from corrente.data.types import Completion, Prompt, Request
from corrente.env.base import Generate
from corrente.sim.distributions import Fixed, LogNormal, LongTail, Uniform
from corrente.sim.faults import Fault
from corrente.sim.pool import VirtualPool
from corrente.sim.speed import Speed
from corrente.testing import Simulation, World, run_virtual, simulate
from corrente.testing.world import LANDINGS, build, flow, play

TAIL = LongTail(body=LogNormal(median=20, sigma=1.0), factor=8, share=0.1)
LIMITS = Limits(episode_s=1000.0)


Seen = dict[tuple[str, str], Completion]
"""Every completion of a run, by its prompt and by the episode and the turn it was for."""


def watched(config: RunConfig, world: World, **how: Any) -> tuple[Simulation, Seen]:
    seen: Seen = {}

    async def watch(prompt: Prompt, request: Request, generate: Generate) -> Completion:
        done = await generate(request)
        seen[prompt.id, request.id.partition("/")[2]] = done
        return done

    run = simulate(config, world, change=wrap_env(watch), **how)
    assert run.error is None
    return run, seen


# ---- resume ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("turns", [1, 3])
@pytest.mark.parametrize("engines", [1, 2])
def test_resuming_gives_what_not_interrupting_gives(turns: int, engines: int) -> None:
    """Every completion of the run, by prompt, episode and turn: as long, as labelled and as finished as under ``swap``."""
    world = World(lengths=TAIL, turns=turns, tool_s=Uniform(low=0, high=2), engines=engines, rows=40)
    plain, undisturbed = watched(flow(steps=1000, ahead=2, window=2, inflight=Swap()), world)
    resumed, interrupted = watched(flow(steps=1000, ahead=2, window=2, inflight=Resume()), world)
    assert undisturbed.keys() == interrupted.keys()
    mixed = 0
    for name, want in undisturbed.items():
        done = interrupted[name]
        assert done.tokens.tolist() == want.tokens.tolist(), name
        assert done.finish_reason == want.finish_reason
        assert len(done.logprobs) == len(done.tokens) == sum(span.stop - span.start for span in done.spans)
        versions = [span.version for span in done.spans]
        assert versions == sorted(set(versions))
        mixed += len(versions) > 1
    assert mixed > 5
    assert plain.counts == resumed.counts
    assert plain.engine_stats.decode_tokens == resumed.engine_stats.decode_tokens  # no token is sampled twice


def test_budget_counts_what_was_written_however_often_it_is_interrupted() -> None:
    world = World(
        lengths=Fixed(10_000), step_s=Fixed(0.0), speed=Speed(step_s=0.1, prefill_token_s=0.001), stage_s=Fixed(0.3)
    )
    config = flow(steps=8, prompts=1, ahead=3, window=1, max_tokens=60, inflight=Resume(), limits=LIMITS)
    _, seen = watched(config, world)
    assert max(len(done.spans) for done in seen.values()) >= 2
    assert {(len(done.tokens), done.finish_reason) for done in seen.values()} == {(60, "length")}


def test_resuming_costs_a_prefill_of_the_live_and_nothing_else() -> None:
    world = World(lengths=Fixed(100), speed=Speed(step_s=0.1, prefill_token_s=0.001), rows=24)
    prefilled = {}
    for landing in (Swap(), Resume()):
        run, _ = watched(flow(steps=1000, ahead=2, window=2, inflight=landing), world)
        prefilled[type(landing)] = run.engine_stats.prefill_tokens
    assert prefilled[Resume] > prefilled[Swap]


def test_abort_of_the_environments_own_is_not_resumed() -> None:
    """An environment ends each of its requests after five seconds, and takes what there is."""
    reasons: Counter[str] = Counter()

    def impatient(parts: Parts) -> Parts:
        async def cut(prompt: Prompt, request: Request, generate: Generate) -> Completion:
            async def end_later() -> None:
                await anyio.sleep(5.0)
                await parts.engine.abort([request.id])

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(end_later)
                done = await generate(request)
                tasks.cancel_scope.cancel()
            reasons[done.finish_reason] += 1
            return done

        return wrap_env(cut)(parts)

    world = World(lengths=Uniform(low=10, high=90))
    run = simulate(flow(steps=6, inflight=Resume()), world, limit_s=1000, change=impatient)
    assert run.error is None
    assert reasons["abort"] > 5
    assert reasons["stop"] > 5


def test_evaluation_is_interrupted_like_everything_else() -> None:
    config = flow(steps=10, ahead=1, eval=Eval(every=2, prompts=6), inflight=Resume())

    def lengths(request: Request) -> float:
        return 200 if request.tokens[1] >= 900 else 60  # held-out prompts have high rows

    run = simulate(config, World(lengths=lengths, eval_rows=6))
    evaluated = [values for _, values in run.sink.rows if "eval/reward" in values]
    assert len(evaluated) >= 2
    assert all(values["eval/episodes"] == 6 for values in evaluated)
    assert all(values["eval/tokens_mean"] == 200 for values in evaluated)
    assert any(values["eval/version_max"] > values["eval/version"] for values in evaluated)


def test_request_that_hangs_delays_an_interruption_by_no_more_than_its_patience() -> None:
    hangs = (Fault(stage="generate", kind="hang", key="2/0/0"),)
    config = flow(steps=10, ahead=2, window=3, size=3, inflight=Resume(), limits=Limits(episode_s=500.0))
    run = simulate(config, World(lengths=TAIL, faults=hangs))
    assert run.counts["trained"] == 20
    gaps = [b - a for (_, a), (_, b) in zip(run.sync.published, run.sync.published[1:], strict=False)]
    assert sorted(gaps)[-2] < 100


# ---- cancel ----------------------------------------------------------------------------------------------------------


def test_groups_past_the_bound_are_given_up_accounted_for_and_replaced() -> None:
    """One prompt in five takes 40 s, and a version a second: with ``max_age`` 1 none of those is ever trained on."""

    def lengths(request: Request) -> float:
        return 400 if request.tokens[1] % 5 == 4 else 4

    config = flow(steps=20, prompts=2, ahead=3, window=8, inflight=Cancel(max_age=1), checkpoint=Checkpoint(every=20))
    run = simulate(config, World(lengths=lengths))
    assert run.counts["trained"] == 40
    assert not {entry.prompt_id for entry in run.consumed} & {f"0/{row}" for row in range(4, 10_000, 5)}
    snapshot, _ = run.checkpoints.read()
    assert list(snapshot.ledger.reasons["cancelled"]) == ["still generating when the inflight policy gave it up"]
    assert sum(run.counts.values()) == len(run.prompts.given) == len(set(run.prompts.given))
    assert run.elapsed_s < 60


@pytest.mark.parametrize("max_age", [0, 1, 2])
def test_no_trained_group_has_seen_more_versions_land_than_it_may(max_age: int) -> None:
    run, seen = watched(flow(steps=30, ahead=3, window=6, inflight=Cancel(max_age=max_age)), World(lengths=TAIL))
    assert run.counts["trained"] == 60
    assert max(len({s.version for s in done.spans}) for done in seen.values()) <= max_age + 1
    assert run.counts["cancelled"] > 6


def test_data_that_is_always_given_up_ends_the_run() -> None:
    world = World(lengths=lambda request: 5000 if request.tokens[1] >= 6 else 3, rows=10)
    run = simulate(flow(steps=1000, ahead=2, window=5, inflight=Cancel(max_age=0), filter=Filter(patience=99)), world)
    assert run.counts["trained"] + run.counts["cancelled"] == 10
    assert run.outcome is not None
    assert run.outcome.ended == "data"


# ---- snapshot --------------------------------------------------------------------------------------------------------


def test_snapshot_keeps_the_version_of_a_live_sequence_and_gives_a_new_one_the_new() -> None:
    world = World(lengths=TAIL, turns=3, tool_s=Fixed(0.5))
    run, seen = watched(flow(steps=20, ahead=2, window=3, inflight=OldWeights()), world)
    assert run.counts["trained"] == 40
    assert {len(done.spans) for done in seen.values() if len(done.tokens)} == {1}
    by_episode: dict[tuple[str, str], list[int]] = {}
    for (prompt, name), done in sorted(seen.items()):
        by_episode.setdefault((prompt, name.partition("/")[0]), []).extend(s.version for s in done.spans)
    assert any(len(set(versions)) > 1 for versions in by_episode.values())
    assert all(versions == sorted(versions) for versions in by_episode.values())


def test_snapshot_makes_the_version_after_next_alone_wait_for_the_slowest() -> None:
    """A sequence of version 0 takes 60 s: version 1 lands beside it at once, version 2 is not staged before it has ended."""

    def lengths(request: Request) -> float:
        return 600 if request.tokens[1] == 3 else 2

    config = flow(steps=6, prompts=2, ahead=2, window=6, inflight=OldWeights(), limits=LIMITS)
    run = simulate(config, World(lengths=lengths))
    at_s = dict(run.sync.published)
    assert at_s[1] < 5.0
    assert at_s[2] >= 60.0
    assert at_s[5] < 70.0
    drained = simulate(msgspec.structs.replace(config, inflight=Drain()), World(lengths=lengths))
    assert dict(drained.sync.published)[1] >= 60.0


def test_every_policy_keeps_its_promise_about_mixed_versions() -> None:
    world = World(lengths=TAIL)
    mixed: dict[str, int] = {}
    for landing in LANDINGS:
        _, seen = watched(flow(steps=12, ahead=2, window=2, inflight=landing), world)
        mixed[type(landing).__name__] = sum(len(done.spans) > 1 for done in seen.values())
    assert {name for name, count in mixed.items() if count} == {"Swap", "Recompute", "Resume"}


# ---- a late engine ---------------------------------------------------------------------------------------------------


def test_restarted_engine_is_caught_up_with_the_live_version_and_gets_traffic_before_the_next() -> None:
    async def main() -> tuple[Simulation, list[tuple[float, int | None]]]:
        world = World(lengths=Fixed(40), engines=2, step_s=Fixed(50.0))
        simulation = build(flow(steps=4, ahead=1, inflight=OldWeights()), world)
        pool = simulation.engine
        assert isinstance(pool, VirtualPool)
        served: list[tuple[float, int | None]] = []
        late = pool.engines[1]
        inner = late.generate

        async def watching(request: Request) -> Completion:
            served.append((anyio.current_time(), late.version))
            return await inner(request)

        late.generate = watching  # type: ignore[method-assign]

        async def restart() -> None:
            await anyio.sleep(51.5)
            late.restart()
            await pool.rejoin(late, simulation.sync.catch_up)
            assert late.version == pool.engines[0].version

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(restart)
            await play(simulation)
        return simulation, served

    run, served = run_virtual(main, limit_s=1e5)
    assert run.error is None
    assert len(run.learner.steps) == 4
    assert None not in {version for _, version in served}
    assert any(at_s > 51.5 for at_s, _ in served)


# ---- what survives a restart -----------------------------------------------------------------------------------------


def known_lengths(request: Request) -> float:
    """By row, episode and turn: from 3 to 120 tokens."""
    return 3 + (31 * int(request.tokens[1]) + request.seed % 7 + 5 * len(request.tokens)) % 118


def total_tokens(world: World, config: RunConfig) -> int:
    """Tokens of all prompts, each generated once: of a run that nothing happens to."""
    run = simulate(config, world)
    assert run.counts["trained"] == world.rows
    return run.engine_stats.decode_tokens


def recorded_tokens(run: Simulation) -> int:
    """What the checkpoint has of groups that are not finished."""
    return _tokens(run.checkpoints.read()[0].unfinished)


def carried_tokens(run: Simulation) -> int:
    """As much of it as the next part goes on from."""
    return _tokens(run.checkpoints.read()[0].admit_again(run.parts.plan, run.parts.inflight.one_version))


def _tokens(unfinished: Iterable[Unfinished]) -> int:
    answers = [a for u in unfinished if u.group is None for record in u.answers for a in record]
    return sum(len(a.completion.tokens) for a in answers if a.completion is not None)


def config_with(every: int, **numbers) -> RunConfig:
    return flow(steps=1000, ahead=2, window=1, limits=LIMITS, checkpoint=Checkpoint(every=every), **numbers)


@pytest.mark.parametrize("landing", LANDINGS[:5], ids=lambda landing: type(landing).__name__)
@pytest.mark.parametrize("turns", [1, 3])
def test_stopped_run_generates_no_token_twice(landing, turns: int) -> None:
    """Together, all parts of the run sample exactly as many tokens as one that was never stopped; and those again of which
    drain and barrier cannot have more under other weights."""
    config = config_with(0, inflight=landing)
    world = World(lengths=known_lengths, turns=turns, tool_s=Fixed(0.3), rows=24)
    parts = [simulate(config, world, stop_at_s=4.3)]
    for at_s in (2.0, 7.1, 3.0):
        parts.append(simulate(config, world, resume=parts[-1].checkpoints.read(), stop_at_s=at_s))
    assert sum(recorded_tokens(part) > 20 for part in parts) >= 2
    again = sum(recorded_tokens(part) - carried_tokens(part) for part in parts)
    assert again == 0 or isinstance(landing, Drain | Barrier)
    parts.append(simulate(config, world, resume=parts[-1].checkpoints.read()))
    assert sum(part.engine_stats.decode_tokens for part in parts) == total_tokens(world, config) + again
    trained = [entry.prompt_id for part in parts for entry in part.consumed]
    assert sorted(trained) == sorted(f"0/{row}" for row in range(24))
    assert max(entry.age for part in parts for entry in part.consumed) <= 2


@pytest.mark.parametrize("landing", [Swap(), Resume(), OldWeights()], ids=lambda landing: type(landing).__name__)
@pytest.mark.parametrize("kill_at_s", [30.05, 48.3, 75.0])
def test_killed_run_goes_on_from_the_partials_of_its_last_checkpoint(landing, kill_at_s: float) -> None:
    """The part after it samples what the checkpoint lacks, to the token: rest of what was begun, all of what was not."""
    config = config_with(1, inflight=landing)
    world = World(lengths=known_lengths, turns=2, tool_s=Fixed(0.3), rows=24)
    first = simulate(config, world, kill_at_s=kill_at_s)
    snapshot, _ = first.checkpoints.read()
    assert recorded_tokens(first) > 0
    assert carried_tokens(first) == recorded_tokens(first) or isinstance(landing, OldWeights)
    second = simulate(config, world, resume=first.checkpoints.read())
    finished = {u.prompt_id for u in snapshot.unfinished if u.group is not None}
    before = [e.prompt_id for e in first.consumed if e.step < snapshot.step]
    done = sum(_length_of(row, config, world) for row in range(24) if f"0/{row}" in finished | set(before))
    assert second.engine_stats.decode_tokens == total_tokens(world, config) - done - carried_tokens(first)
    assert sorted(before + [e.prompt_id for e in second.consumed]) == sorted(f"0/{row}" for row in range(24))


@pytest.mark.parametrize("turns", [1, 2])
@pytest.mark.parametrize(
    "landing", [each for each in LANDINGS if not isinstance(each, Cancel)], ids=lambda landing: type(landing).__name__
)
def test_promise_about_mixed_versions_holds_across_a_restart(landing, turns: int) -> None:
    config = config_with(1, inflight=landing)
    world = World(lengths=known_lengths, turns=turns, tool_s=Fixed(0.3), rows=24)
    requests, groups = 0, 0
    for kill_at_s in (30.05, 48.3, 75.0):
        first = simulate(config, world, kill_at_s=kill_at_s)
        snapshot, _ = first.checkpoints.read()
        begun = {u.prompt_id for u in snapshot.unfinished if any(u.answers)}
        second, seen = watched(config, world, resume=first.checkpoints.read())
        assert second.counts["trained"] == 24
        by_group: dict[str, set[int]] = {}
        for (prompt, _), done in seen.items():
            by_group.setdefault(prompt, set()).update(span.version for span in done.spans)
            requests += prompt in begun and len(done.spans) > 1
        groups += sum(len(by_group[prompt]) > 1 for prompt in begun)
    assert (requests == 0) == isinstance(landing, Drain | Barrier | OldWeights)
    assert groups == 0 if isinstance(landing, Barrier) else groups > 0 or turns == 1


def _length_of(row: int, config: RunConfig, world: World) -> int:
    """Tokens of one prompt's group, when it is alone."""

    async def main() -> Simulation:
        alone = build(config, msgspec.structs.replace(world, rows=row + 1))
        for _ in range(row):
            alone.prompts.next()
        return await play(alone)

    return run_virtual(main).engine_stats.decode_tokens


@pytest.mark.parametrize("kind", ["error", "hang"])
def test_partials_that_fail_cost_a_warning_and_not_the_checkpoint(kind) -> None:
    faults = (Fault(stage="partials", kind=kind, probability=1.0),)
    config = config_with(2)
    run = simulate(config, World(lengths=known_lengths, rows=12, faults=faults))
    assert run.counts["trained"] == 12
    assert len(run.checkpoints.written) >= 3
    warnings = [message for level, message in run.sink.events if level == "warning"]
    assert any("without what" in message and "live requests have so far" in message for message in warnings)
    assert any(("injected" if kind == "error" else "within 5.0 s") in message for message in warnings)


def test_environment_that_asks_something_else_is_played_anew_from_there() -> None:
    """After the restart every second turn has another context: what was recorded of it is not used."""

    def part(mood: int, **how: Any) -> Simulation:
        async def other(prompt: Prompt, request: Request, generate: Generate) -> Completion:
            if request.id.endswith("/1"):
                request = msgspec.structs.replace(request, seed=request.seed + mood)
            return await generate(request)

        return simulate(config, world, change=wrap_env(other), **how)

    config = config_with(0)
    world = World(lengths=lambda request: 20, turns=2, rows=6)
    first = part(0, stop_at_s=3.0)
    snapshot, _ = first.checkpoints.read()
    second_turns = [record[1] for u in snapshot.unfinished for record in u.answers if len(record) > 1]
    lost = sum(len(answer.completion.tokens) for answer in second_turns if answer.completion is not None)
    assert lost > 0
    second = part(1, resume=first.checkpoints.read())
    assert first.engine_stats.decode_tokens + second.engine_stats.decode_tokens == 6 * 2 * 40 + lost
