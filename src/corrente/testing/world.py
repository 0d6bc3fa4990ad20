"""A whole run without a model: the pipeline a config asks for, on virtual parts, in virtual time.

Everything between the parts is what trains for real: the pipeline, the buffer, the gate, the policies, the ledger, the codec of
checkpoints. ``World`` says how long things take and what goes wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import msgspec

from corrente import config as c
from corrente.common import serialization
from corrente.config import Inproc, Run, RunConfig, Staleness, Stream, Swap, Window
from corrente.controller import pipeline
from corrente.controller.parts import Parts, RunResult
from corrente.controller.snapshot import Snapshot
from corrente.data.types import Sampling
from corrente.engine.base import EngineStats
from corrente.entrypoints.assemble import build_buffer, build_inflight, derive_plan
from corrente.errors import CheckpointError
from corrente.learner.base import Learner
from corrente.observe.fanout import Fanout
from corrente.sim.distributions import Distribution, Fixed
from corrente.sim.engine import Lengths, VirtualEngine
from corrente.sim.faults import Chaos, Fault
from corrente.sim.parts import (
    Consumed,
    RecordingSink,
    Reward,
    StepSeconds,
    VirtualAlgorithm,
    VirtualEnv,
    VirtualLearner,
    VirtualPrompts,
    VirtualScorer,
)
from corrente.sim.pool import VirtualPool
from corrente.sim.speed import Speed, SpeedModel
from corrente.sim.sync import VirtualSync
from corrente.staleness import policies
from corrente.testing.clock import run_virtual

Inflight = c.Swap | c.Recompute | c.Resume | c.Drain | c.Barrier | c.Cancel | c.OldWeights
LANDINGS: tuple[Inflight, ...] = (
    c.Swap(),
    c.Recompute(),
    c.Resume(),
    c.Drain(),
    c.Barrier(),
    c.Cancel(max_age=0),
    c.OldWeights(),
)
"""Every inflight policy; ``cancel`` at its strictest."""


class World(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Durations, sizes and faults of the virtual parts. ``rows`` 0: prompts without end; else that many, ``epochs`` times.
    ``shared``, ``sync_deadline_s``: see VirtualSync."""

    lengths: Lengths = Fixed(20)
    speed: SpeedModel = Speed(step_s=0.1, per_sequence_s=0.0)
    engines: int = 1
    max_sequences: int = 1 << 20
    prompt_tokens: int = 16
    turns: int = 1
    tool_s: Distribution = Fixed(0.0)
    score_s: Distribution = Fixed(0.0)
    reward: Reward | None = lambda episode, prompt: float(episode.index % 2)
    reward_deadline_s: float = 30.0
    step_s: StepSeconds = Fixed(1.0)
    export_s: Distribution = Fixed(0.0)
    deliver_s: Distribution = Fixed(0.1)
    shared: bool = False
    sync_deadline_s: float = math.inf
    rows: int = 0
    epochs: int = 1
    eval_rows: int = 0
    faults: tuple[Fault, ...] = ()


def flow(
    *,
    steps: int = 12,
    prompts: int = 2,
    size: int = 2,
    ahead: int = 1,
    window: int | None = 1,
    every: int = 1,
    inflight: Inflight = Swap(),  # noqa: B008 (frozen)
    reject: int | None = None,
    mask: int | None = None,
    max_tokens: int = 1 << 16,
    seed: int = 0,
    **sections: Any,
) -> RunConfig:
    """A config by the numbers that flow control depends on: P, G, S, W (None: stream) and k. ``sections``: whole others."""
    return RunConfig(
        run=Run(steps=steps, prompts_per_step=prompts, group_size=size, seed=seed),
        sampling=Sampling(max_tokens=max_tokens),
        buffer=Stream() if window is None else Window(window=window),
        staleness=Staleness(max=ahead, reject=reject, mask=mask),
        sync=Inproc(every=every),
        inflight=inflight,
        **sections,
    )


class MemoryCheckpoints:
    """Keeps checkpoints as a disk would: as bytes, the learner's one weight beside them."""

    def __init__(self, *, chaos: Chaos | None = None) -> None:
        self._chaos = chaos or Chaos()
        self.written: list[tuple[bytes, int]] = []

    async def write(self, snapshot: Snapshot, learner: Learner) -> Path:
        assert isinstance(learner, VirtualLearner)
        await self._chaos.strike("save", str(snapshot.step), CheckpointError)
        await anyio.lowlevel.checkpoint()
        self.written.append((serialization.encode(snapshot), learner.state))
        return Path(f"step-{snapshot.step}")

    def read(self, at: int = -1) -> tuple[Snapshot, int]:
        data, state = self.written[at]
        return serialization.decode(data, Snapshot), state


class Simulation(msgspec.Struct, kw_only=True, eq=False):
    """One simulated run: its parts, which keep records, and how it ended. ``error`` is what ended it, None when none did."""

    parts: Parts
    engine: VirtualEngine | VirtualPool
    learner: VirtualLearner
    sync: VirtualSync
    algorithm: VirtualAlgorithm
    sink: RecordingSink
    prompts: VirtualPrompts
    checkpoints: MemoryCheckpoints
    outcome: RunResult | None = None
    error: Exception | None = None
    elapsed_s: float = 0.0

    @property
    def consumed(self) -> list[Consumed]:
        return self.algorithm.consumed

    @property
    def max_age(self) -> int:
        """The largest age of all tokens that were trained on, in versions."""
        return max((entry.age for entry in self.consumed), default=0)

    @property
    def engine_stats(self) -> EngineStats:
        """The engine's counters once the run is over; tokens of calls that were cancelled are among them."""
        return run_virtual(self.engine.stats)

    @property
    def counts(self) -> dict[str, int]:
        """Groups per outcome. AssertionError when the run did not end well, with what ended it."""
        assert self.outcome is not None, f"the run failed: {self.error!r}"
        return dict(self.outcome.counts)


def build(
    config: RunConfig,
    world: World,
    *,
    resume: tuple[Snapshot, int] | None = None,
    change: Callable[[Parts], Parts] | None = None,
) -> Simulation:
    """Virtual parts around the real buffer and policies of ``config``. ``resume``: a checkpoint as MemoryCheckpoints reads it.

    ``change`` gets these parts and returns those to run with, some of them replaced by parts of your own.
    """
    seed = config.run.seed
    chaos = Chaos(*world.faults, seed=seed)
    engine = _virtual_engine(world, seed=seed, chaos=chaos)
    learner = VirtualLearner(step_s=world.step_s, seed=seed, chaos=chaos)
    sync = _sync(engine, world, seed=seed, chaos=chaos)
    prompts = VirtualPrompts(
        rows=world.rows or 1 << 20,
        epochs=world.epochs if world.rows else 0,
        prompt_tokens=world.prompt_tokens,
        chaos=chaos,
    )
    env = VirtualEnv(sampling=config.sampling, turns=world.turns, tool_s=world.tool_s, seed=seed, chaos=chaos)
    algorithm, sink, checkpoints = VirtualAlgorithm(), RecordingSink(chaos=chaos), MemoryCheckpoints(chaos=chaos)
    if resume:
        learner.state = resume[1]
    parts = Parts(
        plan=derive_plan(config),
        prompts=prompts,
        engine=engine,
        env=env,
        scorer=VirtualScorer(
            latency_s=world.score_s, reward=world.reward, deadline_s=world.reward_deadline_s, seed=seed, chaos=chaos
        ),
        buffer=build_buffer(config, first_ticket=resume[0].next_ticket if resume else 0),
        staleness=policies.build(config.staleness),
        algorithm=algorithm,
        learner=learner,
        sync=sync,
        inflight=build_inflight(config),
        sink=Fanout([sink]),
        eval_prompts=VirtualPrompts(rows=1 << 10).find_prompts([f"0/{900 + row}" for row in range(world.eval_rows)]),
        checkpoints=checkpoints,
    )
    if change is not None:
        parts = change(parts)
    return Simulation(
        parts=parts,
        engine=engine,
        learner=parts.learner if isinstance(parts.learner, VirtualLearner) else learner,
        sync=sync,
        algorithm=algorithm,
        sink=sink,
        prompts=prompts,
        checkpoints=checkpoints,
    )


def _virtual_engine(world: World, *, seed: int, chaos: Chaos) -> VirtualEngine | VirtualPool:
    engines = [
        VirtualEngine(
            lengths=world.lengths, speed=world.speed, max_sequences=world.max_sequences, seed=seed, chaos=chaos
        )
        for _ in range(world.engines)
    ]
    return VirtualPool(engines) if len(engines) > 1 else engines[0]


def _sync(engine: VirtualEngine | VirtualPool, world: World, *, seed: int, chaos: Chaos) -> VirtualSync:
    return VirtualSync(
        engine,
        export_s=world.export_s,
        deliver_s=world.deliver_s,
        shared=world.shared,
        deadline_s=world.sync_deadline_s,
        seed=seed,
        chaos=chaos,
    )


async def play(
    simulation: Simulation,
    *,
    resume: tuple[Snapshot, int] | None = None,
    stop_at_s: float | None = None,
    kill_at_s: float | None = None,
) -> Simulation:
    """Run to the end, or until asked to stop at ``stop_at_s``, or killed without a word at ``kill_at_s``."""
    stop = anyio.Event()

    async def ask_to_stop(after_s: float) -> None:
        await anyio.sleep(after_s)
        stop.set()

    engines = simulation.engine.engines if isinstance(simulation.engine, VirtualPool) else (simulation.engine,)
    snapshot = resume[0] if resume else None
    with anyio.move_on_after(kill_at_s):
        async with anyio.create_task_group() as tasks:
            for engine in engines:
                tasks.start_soon(engine.run)
            if stop_at_s is not None:
                tasks.start_soon(ask_to_stop, stop_at_s)
            try:
                simulation.outcome = await pipeline.run(simulation.parts, snapshot=snapshot, stop=stop)
            except Exception as error:
                simulation.error = error
            tasks.cancel_scope.cancel()
    simulation.elapsed_s = anyio.current_time()
    return simulation


def simulate(
    config: RunConfig,
    world: World = World(),  # noqa: B008 (frozen)
    *,
    resume: tuple[Snapshot, int] | None = None,
    stop_at_s: float | None = None,
    kill_at_s: float | None = None,
    schedule: int = 0,
    limit_s: float = 1e6,
    change: Callable[[Parts], Parts] | None = None,
) -> Simulation:
    """``build`` and ``play`` in virtual time; ``schedule`` picks the order of tasks that could run at the same moment.

    TimeoutError when the run has neither ended nor failed after ``limit_s`` virtual seconds.
    """

    async def main() -> Simulation:
        simulation = build(config, world, resume=resume, change=change)
        return await play(simulation, resume=resume, stop_at_s=stop_at_s, kill_at_s=kill_at_s)

    return run_virtual(main, seed=schedule, limit_s=limit_s)
