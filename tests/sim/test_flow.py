"""How groups flow: admission, pacing, publishing, provenance, ends. One test per way in which such systems have failed."""

from __future__ import annotations

import bisect
import math
import zlib

import anyio
import pytest
from tests.sim.wrapped_env import wrap_env

from corrente.config import Barrier, Cancel, Drain, Eval, Filter, Limits, OldWeights, Resume
from corrente.controller import pipeline
from corrente.data.types import Completion, Prompt, Request, Sampling
from corrente.env.base import Generate
from corrente.errors import FailureBudgetError, GenerationError, NothingToLearnError
from corrente.sim.distributions import Fixed, LogNormal, LongTail, Uniform
from corrente.sim.engine import VirtualEngine
from corrente.sim.faults import Fault
from corrente.sim.pool import VirtualPool
from corrente.sim.speed import Speed
from corrente.staleness import gate
from corrente.testing import Simulation, World, run_virtual, simulate
from corrente.testing.world import LANDINGS, build, flow, play

TAIL = LongTail(body=LogNormal(median=20, sigma=1.0), factor=8, share=0.1)


def conserved(run: Simulation) -> None:
    """Every admitted prompt ended once; every trained one was admitted, and trained once."""
    counts = run.counts
    assert sum(counts.values()) == len(run.prompts.given) == len(set(run.prompts.given))
    trained = [entry.prompt_id for entry in run.consumed]
    assert len(trained) == len(set(trained)) == counts["trained"]
    assert set(trained) <= set(run.prompts.given)


def column(run: Simulation, name: str) -> list[float]:
    return [values[name] for _, values in run.sink.rows if name in values]


# ---- versions --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("engines", [1, 3])
def test_one_publish_advances_the_version_by_one_everywhere_once(every: int, engines: int) -> None:
    world = World(
        lengths=TAIL,
        engines=engines,
        faults=(
            Fault(stage="flip", calls=(1, 4)),
            Fault(stage="apply", calls=(2, 9)),
            Fault(stage="stage", calls=(3,)),
        ),
    )
    run = simulate(flow(steps=12, every=every), world)
    conserved(run)
    assert [version for version, _ in run.sync.published] == list(range(12 // every + 1))
    assert [step.version for step in run.learner.steps] == [step // every for step in range(12)]
    held = run.engine.engines if isinstance(run.engine, VirtualPool) else (run.engine,)
    assert {engine.version for engine in held} == {12 // every}
    assert run.outcome is not None
    assert run.outcome.version == 12 // every


@pytest.mark.parametrize("landing", LANDINGS, ids=lambda landing: type(landing).__name__)
@pytest.mark.parametrize("stage_s", [0.0, 500.0])
def test_on_policy_trains_and_does_not_hang(landing, stage_s: float) -> None:
    run = simulate(flow(steps=6, ahead=0, window=1, inflight=landing), World(lengths=TAIL, stage_s=Fixed(stage_s)))
    conserved(run)
    assert len(run.learner.steps) == 6
    assert run.max_age == 0


@pytest.mark.parametrize("landing", LANDINGS, ids=lambda landing: type(landing).__name__)
def test_token_is_labelled_with_the_version_that_sampled_it(landing) -> None:
    """Prefill takes so long that weights land between sending a request and its first token; labels follow the flips."""
    world = World(
        lengths=Uniform(low=5, high=80),
        speed=Speed(step_s=0.05, per_sequence_s=0.0, prefill_token_s=0.02),
        max_sequences=6,
        score_s=Fixed(1.0),
    )

    seen: list[tuple[float, float, Completion]] = []

    async def watch(prompt: Prompt, request: Request, generate: Generate) -> Completion:
        began_s = anyio.current_time()
        done = await generate(request)
        seen.append((began_s, anyio.current_time(), done))
        return done

    run = simulate(flow(steps=15, ahead=2, inflight=landing), world, change=wrap_env(watch))
    assert run.error is None
    flips_s = [at_s for _, at_s in run.sync.published]
    late = mixed = 0
    for began_s, ended_s, done in seen:
        versions = [span.version for span in done.spans]
        first, last = bisect.bisect_right(flips_s, began_s) - 1, bisect.bisect_right(flips_s, ended_s) - 1
        before = (
            bisect.bisect_left(flips_s, ended_s) - 1
        )  # the version live just before the end, if a flip is at the end
        assert versions == sorted(set(versions))
        assert first <= versions[0] <= versions[-1] <= last
        assert versions[-1] >= before or isinstance(landing, OldWeights)
        late += versions[0] > first
        mixed += len(versions) > 1
    unmixed = isinstance(landing, Drain | Barrier | Cancel)
    if not isinstance(landing, OldWeights):  # to it a request belongs from the moment its prefill begins
        assert (late == 0) == unmixed  # else weights did land between the call and its first token
    assert (mixed == 0) == (unmixed or isinstance(landing, OldWeights))


def test_barrier_mixes_no_versions_in_a_group_and_drain_none_in_a_request() -> None:
    world = World(lengths=TAIL, turns=3, tool_s=Uniform(low=0, high=3))
    mixed = {}
    for landing in (Drain(), Barrier()):
        run = simulate(flow(steps=10, inflight=landing), world)
        conserved(run)
        mixed[type(landing).__name__] = sum(
            1 for entry in run.consumed if entry.oldest < entry.version and entry.oldest != entry.admitted_version
        )
        groups = [sample["versions"] for _, sample in run.sink.samples]
        assert groups
        if isinstance(landing, Barrier):
            assert all(len(versions) == 1 for versions in groups)
        else:
            assert any(len(versions) > 1 for versions in groups)


def test_restarted_engine_gets_no_request_before_it_holds_the_current_weights() -> None:
    class Restarting(VirtualEngine):
        def __init__(self, **kwargs) -> None:
            super().__init__(**kwargs)
            self.got: list[int | None] = []
            self.pool: VirtualPool | None = None

        async def generate(self, request: Request) -> Completion:
            assert self.pool is not None
            self.got.append(self.version)
            assert self.version == max(e.version or 0 for e in self.pool.engines)
            return await super().generate(request)

    async def main() -> tuple[Simulation, list[Restarting]]:
        simulation = build(flow(steps=12, ahead=1), World(lengths=TAIL, engines=2, step_s=Fixed(2.0)))
        assert isinstance(simulation.engine, VirtualPool)
        engines = [Restarting(lengths=TAIL, speed=Speed(step_s=0.1), seed=at) for at in range(2)]
        simulation.engine.engines = tuple(engines)
        for engine in engines:
            engine.pool = simulation.engine

        async def restart() -> None:
            for after_s in (7.0, 11.0):
                await anyio.sleep(after_s)
                engines[0].restart()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(restart)
            await play(simulation)
        return simulation, engines

    run, engines = run_virtual(main, limit_s=1e5)
    conserved(run)
    assert len(run.learner.steps) == 12
    assert None not in engines[0].got
    assert len(set(engines[0].got)) > 3


# ---- pacing ----------------------------------------------------------------------------------------------------------


def test_fast_generator_is_paced_and_nothing_is_thrown_away() -> None:
    run = simulate(flow(steps=20, ahead=1), World(lengths=Fixed(1), step_s=Fixed(10.0)))
    conserved(run)
    assert run.counts["stale"] == 0
    assert run.counts["cancelled"] <= 4  # what was in flight at the end: never more than the slots
    assert min(column(run, "wait/feed_slot_fraction")[1:]) > 0.9
    assert sum(column(run, "wait/learner_groups_fraction")[2:]) < 0.1
    assert run.elapsed_s < 20 * 10.0 * 1.02


def test_slow_generator_makes_the_learner_wait_for_groups_and_says_so() -> None:
    run = simulate(flow(steps=20, ahead=1), World(lengths=Fixed(200), step_s=Fixed(0.5)))
    conserved(run)
    waited = [v["wait/learner_groups_fraction"] * v["time/step_s"] for _, v in run.sink.rows]
    assert sum(waited) > 0.9 * run.elapsed_s
    assert max(column(run, "learner/idle_fraction")) > 0.9


def test_both_sides_overlap_up_to_the_slower_one() -> None:
    """Equal speeds: with S = 1 a step costs what the slower side needs, and not their sum, as it does with S = 0."""
    world = World(lengths=Fixed(20), step_s=Fixed(2.0), stage_s=Fixed(0.0))
    overlapped = simulate(flow(steps=20, ahead=1), world).elapsed_s
    alternating = simulate(flow(steps=20, ahead=0), world).elapsed_s
    assert overlapped == pytest.approx(20 * 2.0 + 2.0, rel=0.02)
    assert alternating == pytest.approx(20 * 4.0, rel=0.02)


@pytest.mark.parametrize("cause", ["filtered", "failed", "stale"])
def test_dropping_groups_admits_as_many(cause: str) -> None:
    """Half of everything is dropped, for one reason; the slots stay full, and every step still gets its groups."""
    worlds = {
        "filtered": World(lengths=TAIL, reward=lambda e, p: float(e.index) * (p.fields["row"] % 2)),
        "failed": World(lengths=TAIL, faults=(Fault(stage="generate", probability=0.4),)),
        "stale": World(lengths=TAIL, step_s=Fixed(3.0)),
    }
    config = flow(
        steps=15, ahead=2, window=2, limits=Limits(failure_fraction=1.0), reject=0 if cause == "stale" else None
    )
    run = simulate(config, worlds[cause])
    conserved(run)
    assert run.counts["trained"] == 30
    assert run.counts[cause] >= 10
    assert run.counts["cancelled"] <= gate.slots(config)
    held = [sum(values[f"buffer/{k}"] for k in ("generating", "ready", "training")) for _, values in run.sink.rows]
    assert max(held) <= gate.slots(config)
    assert max(held[:-1]) == gate.slots(config)


def test_slow_prompts_are_not_starved() -> None:
    """Long groups are trained as often as they are generated; taking them in order of completion would favour the short."""

    def lengths(request: Request) -> float:
        return 300 if request.tokens[1] % 5 == 4 else 10

    run = simulate(flow(steps=40, prompts=4, ahead=2, window=3), World(lengths=lengths))
    conserved(run)
    slow = sum(int(entry.prompt_id.split("/")[1]) % 5 == 4 for entry in run.consumed)
    assert slow / len(run.consumed) == pytest.approx(0.2, abs=0.02)


@pytest.mark.parametrize(
    "landing", [Drain(), Barrier(), Resume(), OldWeights()], ids=lambda landing: type(landing).__name__
)
@pytest.mark.parametrize(("ahead", "window"), [(0, 1), (0, 2), (1, 1), (2, 3)])
def test_landing_that_waits_and_admission_that_waits_do_not_block_each_other(landing, ahead: int, window: int) -> None:
    """The feed waits for slots that a publish frees, the publish waits for requests that hold slots (or the weights it is to
    overwrite): nobody holds a lock."""
    world = World(lengths=TAIL, turns=2, tool_s=Fixed(1.0), max_sequences=3, score_s=Uniform(low=0, high=9))
    config = flow(steps=8, ahead=ahead, window=window, inflight=landing)
    for schedule in range(3):
        conserved(simulate(config, world, schedule=schedule, limit_s=20_000))


# ---- episodes and groups ---------------------------------------------------------------------------------------------


def test_rollout_that_never_ends_is_ended_counted_and_its_slot_comes_back() -> None:
    """Both episodes of prompt 3 hang: its group fails at the deadline; one of prompt 5: the lone survivor is dropped too."""
    hangs = tuple(Fault(stage="generate", kind="hang", key=key) for key in ("3/0/0", "3/1/0", "5/1/0"))
    run = simulate(flow(steps=12, ahead=1, limits=Limits(episode_s=60.0)), World(faults=hangs))
    conserved(run)
    assert len(run.learner.steps) == 12
    assert run.counts["failed"] == 2
    assert run.elapsed_s < 12 * 2.2 + 2 * 60 + 10
    trained = {entry.group for entry in run.consumed}
    assert not trained & {3, 5}


def test_groups_are_formed_by_id_and_all_members_see_the_same_task() -> None:
    """Lengths are wild and twelve prompts interleave: every completion in a group carries the mark of that group's prompt."""
    checked = 0

    async def main() -> Simulation:
        nonlocal checked
        simulation = build(flow(steps=15, size=4, prompts=3, ahead=2, window=4), World(lengths=TAIL, max_sequences=7))
        batch = simulation.algorithm.batch

        def checking(groups, **kwargs):
            nonlocal checked
            for group in groups:
                mark = zlib.crc32(group.prompt.tokens.tobytes()) & 0x7FFF
                assert [e.index for e in group.episodes] == [0, 1, 2, 3]
                assert {(e.group_id, e.prompt_id) for e in group.episodes} == {(group.id, group.prompt.id)}
                assert {int(t) for e in group.episodes for c in e.completions for t in c.tokens} == {mark}
                assert len({len(c.tokens) for e in group.episodes for c in e.completions}) > 1
                checked += 1
            return batch(groups, **kwargs)

        simulation.algorithm.batch = checking  # type: ignore[method-assign]
        return await play(simulation)

    conserved(run_virtual(main))
    assert checked == 45


def test_group_of_which_one_member_cannot_start_still_completes() -> None:
    """The first episode of every third prompt dies before it asks for anything, while its siblings queue for the engine."""
    faults = tuple(Fault(stage="env", key=f"{ticket}/0") for ticket in range(1, 60, 3))
    config = flow(steps=8, size=4, ahead=1, window=2, limits=Limits(failure_fraction=1.0))
    run = simulate(config, World(lengths=TAIL, max_sequences=3, faults=faults))
    conserved(run)
    assert run.counts["failed"] == 0
    sizes = {values["samples/trained"] for _, values in run.sink.rows}
    assert sizes & {7.0, 6.0}
    assert max(sizes) <= 8.0


def test_groups_that_teach_nothing_are_warned_about_and_then_end_the_run() -> None:
    config = flow(steps=10, prompts=4, filter=Filter(patience=5))
    run = simulate(config, World(reward=lambda episode, prompt: 1.0))
    assert isinstance(run.error, NothingToLearnError)
    assert "filter.patience" in str(run.error)
    warnings = [message for level, message in run.sink.events if level == "warning"]
    assert len(warnings) == 2
    assert "4 groups in a row" in warnings[0]
    assert "10 groups in a row" in warnings[1]
    assert 20 <= len(run.prompts.given) <= 20 + gate.slots(config)
    assert run.learner.steps == []


def test_group_that_teaches_resets_the_count_of_those_that_do_not() -> None:
    def reward(episode, prompt) -> float:
        return float(episode.index) if prompt.fields["row"] % 10 == 0 else 1.0

    run = simulate(flow(steps=6, prompts=4, filter=Filter(patience=5)), World(reward=reward))
    conserved(run)
    assert run.counts["trained"] == 24
    assert run.counts["filtered"] >= 200


# ---- ends ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "epochs"), [(1, 1), (7, 1), (8, 1), (5, 3), (3, 2)])
@pytest.mark.parametrize("window", [1, 3])
def test_finite_data_ends_the_run_with_every_prompt_trained_once(rows: int, epochs: int, window: int) -> None:
    run = simulate(flow(steps=1000, ahead=1, window=window, prompts=2), World(lengths=TAIL, rows=rows, epochs=epochs))
    conserved(run)
    assert run.outcome is not None
    assert run.outcome.ended == "data"
    assert run.counts["trained"] == rows * epochs
    assert {e.prompt_id for e in run.consumed} == {f"{epoch}/{row}" for epoch in range(epochs) for row in range(rows)}
    assert run.outcome.steps == math.ceil(rows * epochs / 2)


def test_finite_data_ends_although_its_last_groups_are_dropped() -> None:
    world = World(lengths=TAIL, rows=9, reward=lambda e, p: float(e.index) * (p.fields["row"] < 5))
    run = simulate(flow(steps=100), world)
    conserved(run)
    assert (run.counts["trained"], run.counts["filtered"]) == (5, 4)


@pytest.mark.parametrize("rows", [1, 3])
def test_finite_data_of_which_nothing_was_trained_on_is_an_error(rows: int) -> None:
    run = simulate(flow(steps=100), World(rows=rows, reward=lambda e, p: 1.0))
    assert isinstance(run.error, NothingToLearnError)
    assert f"nothing of it was trained on ({rows} filtered: all rewards equal" in str(run.error)


@pytest.mark.parametrize(("probability", "ends"), [(0.3, True), (0.7, False)])
def test_finite_data_of_which_too_much_failed_is_an_error_although_no_window_is_full(
    probability: float, ends: bool
) -> None:
    faults = (Fault(stage="generate", probability=probability),)
    run = simulate(flow(steps=100), World(rows=5, faults=faults))
    if ends:
        assert run.error is None
        assert run.outcome is not None
        assert run.outcome.ended == "data"
    else:
        assert isinstance(run.error, FailureBudgetError)
        assert "the data ended, and" in str(run.error)


def test_no_data_at_all_ends_the_run() -> None:
    async def main() -> Simulation:
        simulation = build(flow(steps=5), World(rows=1))
        assert simulation.prompts.next() is not None
        return await play(simulation)

    run = run_virtual(main)
    assert run.outcome is not None
    assert (run.outcome.ended, run.outcome.steps) == ("data", 0)


@pytest.mark.parametrize("landing", LANDINGS, ids=lambda landing: type(landing).__name__)
def test_steps_end_the_run_with_episodes_still_in_flight(landing) -> None:
    run = simulate(flow(steps=4, ahead=2, inflight=landing), World(lengths=Fixed(500)))
    conserved(run)
    assert run.outcome is not None
    assert run.outcome.ended == "steps"
    given_up = 6 * 3 if isinstance(landing, Cancel) else 0  # what three flips may find generating
    assert 0 < run.counts["cancelled"] <= 6 + given_up


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("at_s", [0.0, 0.05, 0.5, 3.0, 11.0])
def test_stopping_with_stuck_requests_is_quick(every: int, at_s: float) -> None:
    """One request in four hangs for ever and the deadline is far away. A stop between versions does not wait for it."""
    world = World(faults=(Fault(stage="generate", kind="hang", probability=0.25),), lengths=Fixed(5))
    config = flow(steps=1000, ahead=1, window=2, size=4, every=every, limits=Limits(episode_s=50.0))
    run = simulate(config, world, stop_at_s=at_s)
    conserved(run)
    assert run.outcome is not None
    assert run.outcome.ended == "stopped"
    waits_s = 2.0 if every == 1 else 2.0 + 3 * 51.0
    assert run.elapsed_s <= at_s + waits_s
    assert len(run.checkpoints.written) == 1


@pytest.mark.parametrize("landing", LANDINGS, ids=lambda landing: type(landing).__name__)
def test_stopping_while_a_flip_waits_for_a_stuck_request_is_quick(landing) -> None:
    """The learner goes on until the version before is live, and one request holds that up for ever."""
    world = World(lengths=Fixed(5), faults=(Fault(stage="generate", kind="hang", key="3/0/*"),))
    run = simulate(flow(steps=1000, ahead=2, window=3, inflight=landing), world, stop_at_s=10.0)
    conserved(run)
    assert run.outcome is not None
    assert run.outcome.ended == "stopped"
    assert run.elapsed_s < 18.0
    assert len(run.checkpoints.written) == 1


@pytest.mark.parametrize("at_s", [5.0, 8.0, 11.0])
def test_stopping_begins_no_evaluation(at_s: float) -> None:
    """A version that lands after the stop is not evaluated, however due it is."""
    slow = Fault(stage="flip", kind="slow", delay_s=2.0, probability=1.0)
    world = World(lengths=lambda r: 20 if r.group.isdigit() else 3000, eval_rows=2, faults=(slow,))
    run = simulate(flow(steps=1000, eval=Eval(every=1, at_start=False)), world, stop_at_s=at_s)
    assert run.elapsed_s < at_s + 10


def test_stopping_ends_the_last_evaluation_and_a_checkpoint_of_all_steps_is_there() -> None:
    world = World(lengths=lambda r: 20 if r.group.isdigit() else 3000, eval_rows=2)
    run = simulate(flow(steps=3, eval=Eval(every=3, at_start=False)), world, stop_at_s=20.0)
    assert run.outcome is not None
    assert run.outcome.ended == "steps"
    assert run.elapsed_s < 21.0
    assert run.checkpoints.read()[0].step == 3


def test_evaluation_runs_beside_training_and_is_labelled_with_what_sampled_it() -> None:
    world = World(lengths=Fixed(30), eval_rows=6)
    config = flow(steps=10, ahead=1, eval=Eval(every=4, prompts=6, at_once=6))
    run = simulate(config, world)
    conserved(run)
    evaluated = [(step, values) for step, values in run.sink.rows if "eval/reward" in values]
    assert [values["eval/version"] for _, values in evaluated] == [0, 4, 8, 10]
    assert all(values["eval/episodes"] == 6 for _, values in evaluated)
    quiet = simulate(flow(steps=10, ahead=1, eval=Eval(every=0)), world)
    assert run.elapsed_s - quiet.elapsed_s == pytest.approx(3.0, abs=0.5)  # the last evaluation alone is waited for


def test_evaluation_that_fails_is_visible_and_does_not_end_the_run() -> None:
    world = World(eval_rows=4, faults=(Fault(stage="generate", key="eval-*"),))
    run = simulate(flow(steps=6, eval=Eval(every=3)), world)
    conserved(run)
    assert [v["eval/lost"] for _, v in run.sink.rows if "eval/lost" in v] == [4.0, 4.0, 4.0]
    assert any("evaluation" in message for _, message in run.sink.events)


# ---- the same seed, the same run -------------------------------------------------------------------------------------


@pytest.mark.parametrize("landing", LANDINGS, ids=lambda landing: type(landing).__name__)
def test_seed_decides_the_run_and_the_schedule(landing) -> None:
    def record(seed: int, schedule: int) -> list[object]:
        world = World(lengths=TAIL, reward=None, score_s=Uniform(low=0, high=2), step_s=Uniform(low=0.5, high=2))
        run = simulate(flow(steps=8, size=3, ahead=2, window=2, seed=seed, inflight=landing), world, schedule=schedule)
        return [(c.step, c.group, c.oldest) for c in run.consumed] + [s.start_s for s in run.learner.steps]

    assert record(1, 0) == record(1, 0)
    assert record(1, 0) != record(2, 0)


def test_engine_is_not_asked_before_it_holds_weights() -> None:
    """The pipeline publishes the first version before it admits anything, also when that takes several tries."""
    run = simulate(flow(steps=3), World(faults=(Fault(stage="apply", calls=(0, 1)), Fault(stage="stage", calls=(0,)))))
    conserved(run)
    assert run.counts["failed"] == 0
    request = Request(id="early", tokens=run.parts.prompts.find(["0/0"])[0].tokens, sampling=Sampling())
    with pytest.raises(GenerationError, match="no weights"):
        run_virtual(VirtualEngine().generate, request)


def test_run_closes_its_sinks_also_when_it_fails() -> None:
    async def main() -> Simulation:
        simulation = build(flow(), World(faults=(Fault(stage="step", kind="death", calls=(2,)),)))
        assert isinstance(simulation.engine, VirtualEngine)
        async with simulation.engine.running():
            try:
                await pipeline.run(simulation.parts)
            except Exception as error:
                simulation.error = error  # type: ignore[assignment]
        return simulation

    run = run_virtual(main)
    assert run.error is not None
    assert run.sink.closed
