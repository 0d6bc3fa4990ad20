"""Random configurations, worlds and faults: no prompt is lost or trained twice, no token is too old, every run ends."""

from __future__ import annotations

import math

import pytest
from hypothesis import Phase, given, seed, settings
from hypothesis import strategies as st

from corrente.config import Cancel, Double, Filter, Limits, NoBuffer, RunConfig, Window
from corrente.errors import (
    FailureBudgetError,
    NothingToLearnError,
    PipelineError,
    SyncError,
)
from corrente.sim.distributions import Distribution, Fixed, LogNormal, LongTail, Uniform
from corrente.sim.faults import Fault
from corrente.sim.speed import Speed
from corrente.staleness import gate
from corrente.testing import Simulation, World, simulate
from corrente.testing.world import LANDINGS, flow

LIMITS = Limits(episode_s=40.0, watchdog_s=2000.0, failure_fraction=0.9, failure_window=64)

durations: st.SearchStrategy[Distribution] = st.one_of(
    st.builds(Fixed, st.floats(0, 20)),
    st.builds(lambda low, more: Uniform(low=low, high=low + more), st.floats(0, 5), st.floats(0, 20)),
    st.builds(lambda median, sigma: LogNormal(median=median, sigma=sigma), st.floats(0.1, 5), st.floats(0.1, 1.5)),
)
lengths = st.one_of(
    st.builds(Fixed, st.integers(0, 60)),
    st.builds(lambda median: LogNormal(median=median, sigma=1.0), st.integers(1, 40)),
    st.just(LongTail(body=Uniform(low=1, high=20), factor=30, share=0.05)),
)


@st.composite
def configs(draw: st.DrawFn) -> RunConfig:
    """Any buffer, landing, window, depth, version control and publishing interval that the checks would let through."""
    prompts, every, ahead = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(0, 3))
    slots = (ahead + 1) * prompts * every
    kind = draw(st.sampled_from(["none", "double", "window", "window", "stream"]))
    window = None if kind == "stream" else draw(st.integers(0, slots))
    stale = draw(st.sampled_from([(None, None), (None, None), (1, None), (None, 1), (2, 1), (0, None)]))
    if kind == "stream" and stale == (None, None):
        stale = (2, None)
    config = flow(
        steps=every * draw(st.integers(1, 8)),
        prompts=prompts,
        size=draw(st.integers(2, 4)),
        ahead=ahead,
        window=window,
        every=every,
        inflight=draw(st.sampled_from([*LANDINGS, Cancel(max_age=1)])),
        reject=stale[0],
        mask=stale[1],
        max_tokens=draw(st.sampled_from([10, 100, 1000])),
        seed=draw(st.integers(0, 1000)),
        limits=LIMITS,
        filter=Filter(patience=50),
    )
    fixed = {"none": NoBuffer(), "double": Double()}
    if kind not in fixed:
        return config
    return RunConfig(**{**{f: getattr(config, f) for f in config.__struct_fields__}, "buffer": fixed[kind]})


def faults(*, deadly: bool) -> st.SearchStrategy[tuple[Fault, ...]]:
    chance = st.sampled_from([0.02, 0.1, 0.3])
    passing = st.one_of(
        st.builds(
            lambda stage, kind, p: Fault(stage=stage, kind=kind, probability=p, delay_s=15.0),
            st.sampled_from(["generate", "env", "score"]),
            st.sampled_from(["error", "hang", "slow"]),
            chance,
        ),
        st.builds(
            lambda stage, kind, at: Fault(stage=stage, kind=kind, calls=(at,), delay_s=30.0),
            st.sampled_from(["export", "deliver", "flip", "apply"]),
            st.sampled_from(["error", "slow"]),
            st.integers(0, 8),
        ),
        st.builds(lambda at: Fault(stage="sink", calls=(at,)), st.integers(0, 20)),
    )
    fatal = st.builds(
        lambda stage, kind, at: Fault(stage=stage, kind=kind, calls=(at,)),
        st.sampled_from(["export", "deliver", "flip", "apply", "step", "save", "generate", "score"]),
        st.sampled_from(["hang", "death"]),
        st.integers(0, 12),
    )
    return st.lists(st.one_of(passing, fatal) if deadly else passing, max_size=3).map(tuple)


def worlds(*, deadly: bool = False) -> st.SearchStrategy[World]:
    return st.builds(
        lambda lengths, speed, engines, slots, turns, score_s, step_s, export_s, deliver_s, shared, rows, epochs, easy, faults: (
            World(
                lengths=lengths,
                speed=speed,
                engines=engines,
                max_sequences=slots,
                turns=turns,
                tool_s=Uniform(low=0, high=2),
                score_s=score_s,
                reward=(lambda episode, prompt: float(episode.index % 2)) if easy else None,
                reward_deadline_s=10.0,
                step_s=step_s,
                export_s=export_s,
                deliver_s=deliver_s,
                shared=shared,
                sync_deadline_s=3 * LIMITS.watchdog_s,
                rows=rows,
                epochs=epochs,
                faults=faults,
            )
        ),
        lengths=lengths,
        speed=st.sampled_from([Speed(step_s=0.05), Speed(step_s=0.2, prefill_token_s=0.01, flip_s=0.3)]),
        engines=st.integers(1, 3),
        slots=st.sampled_from([1, 3, 1000]),
        turns=st.integers(1, 2),
        score_s=durations,
        step_s=durations,
        export_s=durations,
        deliver_s=st.one_of(durations, st.builds(Fixed, st.floats(20, 200))),
        shared=st.booleans(),
        rows=st.sampled_from([0, 0, 1, 5, 17]),
        epochs=st.integers(1, 2),
        easy=st.booleans(),
        faults=faults(deadly=deadly),
    )


def check_account(run: Simulation, config: RunConfig) -> None:
    """Nothing lost, nothing trained twice, nothing too old: of a run that ended well."""
    counts = run.counts
    assert sum(counts.values()) == len(run.prompts.given) == len(set(run.prompts.given))
    trained = [entry.prompt_id for entry in run.consumed]
    assert len(trained) == len(set(trained)) == counts["trained"]
    limit = gate.max_age(config)
    assert limit is None or run.max_age <= limit
    if limit is not None and config.run.steps and type(config.buffer) in (NoBuffer, Double, Window):
        ahead = {NoBuffer: 0, Double: 1}.get(type(config.buffer), config.staleness.max)
        per_version = config.run.prompts_per_step * config.sync.every
        window = gate.window(config)
        assert run.max_age <= (ahead + math.ceil((window - 1) / per_version) if ahead else 0)


def with_passing_faults(config: RunConfig, world: World, schedule: int) -> None:
    run = simulate(config, world, schedule=schedule, limit_s=200_000)
    if run.error is not None:  # so much failed, or so little was taught, that the run says so
        assert isinstance(run.error, FailureBudgetError | NothingToLearnError | SyncError), run.error
        return
    assert run.outcome is not None
    check_account(run, config)
    if run.outcome.ended == "steps":
        assert run.outcome.steps == config.run.steps
    else:
        assert run.outcome.ended == "data"
        assert run.counts["cancelled"] == 0 or isinstance(config.inflight, Cancel)
        assert len(run.prompts.given) == world.rows * world.epochs


def with_deadly_faults(config: RunConfig, world: World, schedule: int) -> None:
    run = simulate(config, world, schedule=schedule, limit_s=200_000)
    if run.error is not None:
        assert isinstance(run.error, PipelineError), run.error
    else:
        check_account(run, config)
    trained = [entry.prompt_id for entry in run.consumed]
    assert len(trained) == len(set(trained))


PROPERTIES = {
    "passing faults": (with_passing_faults, worlds()),
    "deadly faults": (with_deadly_faults, worlds(deadly=True)),
}


def explore(name: str, *, examples: int, start: int, shrink: bool = False) -> None:
    """Try ``examples`` runs; ``start`` decides which. Shrinking a failure takes minutes."""
    prop, world = PROPERTIES[name]
    tried = given(config=configs(), world=world, schedule=st.integers(0, 1000))(prop)
    phases = [Phase.generate, Phase.shrink] if shrink else [Phase.generate]
    seed(start)(settings(max_examples=examples, phases=phases)(tried))()


@pytest.mark.parametrize("block", range(12))
@pytest.mark.parametrize("name", PROPERTIES)
def test_any_run_ends_and_accounts_for_every_prompt(name: str, block: int) -> None:
    explore(name, examples=3, start=block)


@pytest.mark.slow
@pytest.mark.parametrize("name", PROPERTIES)
def test_many_runs_end_and_account_for_every_prompt(name: str) -> None:
    explore(name, examples=150, start=1000, shrink=True)
