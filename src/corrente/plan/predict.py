"""The production pipeline on virtual parts with the costs of a setting, and what comes out of it.

A run reaches a steady state after a few versions; it is simulated until then and for ``steps`` more, over which everything is a
mean. A synchronous run with shared devices generates on all of them, then trains on all of them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from statistics import fmean

import msgspec

from corrente import config as c
from corrente.config import RunConfig
from corrente.errors import ConfigError
from corrente.plan.costs import (
    EngineSpeed,
    LearnerSpeed,
    MemoryUse,
    deliver_s,
    export_s,
    memory_use,
    switch_s,
)
from corrente.plan.setting import Setting, Split
from corrente.sim.distributions import Fixed
from corrente.testing.world import Simulation, World, simulate

SAMPLES = 1024
"""Samples of a step that are simulated, where the batch can be divided."""
LEAST_PROMPTS = 32
WARM_UP = 3
"""Steps beside those of the first ``ahead`` versions that are left out of the means."""


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """What a split of the devices would give.

    ``step_s``: mean seconds of a step. ``engine_busy``, ``learner_busy``: fractions of the time. ``lag_mean``, ``lag_max``:
    versions by which trained tokens were old. ``step_seconds``: of each simulated step.
    """

    split: Split
    step_s: float
    samples_per_s: float
    tokens_per_s: float
    engine_busy: float
    learner_busy: float
    lag_mean: float
    lag_max: float
    memory: MemoryUse
    device_hours: float
    cost: float
    step_seconds: tuple[float, ...]

    @property
    def waiting(self) -> str:
        """The line that says who waits for whom."""
        if self.split.ahead == 0:
            return f"in turns: the learner idles {1 - self.learner_busy:.0%}, the engines {1 - self.engine_busy:.0%}"
        if self.learner_busy > 0.97:
            return f"the learner never waits; the engines idle {1 - self.engine_busy:.0%}"
        who = "the learner waits for generation" if self.engine_busy > self.learner_busy else "both wait"
        return f"{who}: it idles {1 - self.learner_busy:.0%}, the engines {1 - self.engine_busy:.0%}"


def predict(setting: Setting, split: Split, *, steps: int = 12, of_steps: int = 1000, scale: int = 0) -> Prediction:
    """Simulate a run and return its means; hours and cost are those of ``of_steps`` steps.

    ``scale``: simulate this fraction of the prompts, engines and ranks, 1 / scale of each, which is as fast but for what depends
    on the longest of many; 0: the least that leaves at most ``SAMPLES`` samples a step. ConfigError when the setting cannot run,
    such as weights that do not fit.
    """
    scale = scale or choose_scale(setting, split)
    memory = memory_use(setting, split)
    if memory.sequences < 1:
        raise ConfigError(
            f"{setting.model.name} does not fit {split.tensor_parallel} x {setting.device.name}: weights and one sequence take "
            f"{memory.engine / 1e9:.0f} of {memory.capacity / 1e9:.0f} GB; more devices to an engine are needed (--tp)"
        )
    warm_up = WARM_UP + split.ahead
    run = simulate(
        _config(setting, split, steps=warm_up + steps, scale=scale),
        _world(setting, split, memory, scale=scale),
        limit_s=1e9,
    )
    if run.error is not None:
        raise run.error
    seconds = _step_seconds(run)[warm_up:]
    rows = [row for _, row in run.sink.rows][warm_up:]
    mean_s = fmean(seconds)
    samples = setting.prompts * setting.group
    hours = mean_s * of_steps / 3600 * setting.devices
    engine_s = [row["engine/busy_s"] for row in rows]
    busy = (engine_s[-1] - engine_s[0]) / max(1e-9, split.replicas / scale * sum(seconds[1:])) if len(rows) > 1 else 1.0
    return Prediction(
        split=split,
        step_s=mean_s,
        samples_per_s=samples / mean_s,
        tokens_per_s=scale * fmean(row["samples/tokens"] for row in rows) / mean_s,
        engine_busy=min(1.0, busy),
        learner_busy=min(1.0, fmean(row["learner/busy_s"] for row in rows) / mean_s),
        lag_mean=fmean(row["lag/mean"] for row in rows),
        lag_max=max(row["lag/max"] for row in rows),
        memory=memory,
        device_hours=hours,
        cost=hours * setting.price,
        step_seconds=tuple(seconds),
    )


def choose_scale(setting: Setting, split: Split) -> int:
    """The least divisor of prompts, replicas and ranks that leaves at most ``SAMPLES`` samples a step; else the largest."""
    common = math.gcd(setting.prompts, split.replicas, split.training)
    divisors = [
        part for part in range(1, common + 1) if common % part == 0 and setting.prompts // part >= LEAST_PROMPTS
    ]
    small = [part for part in divisors if setting.prompts * setting.group / part <= SAMPLES]
    return min(small) if small else max(divisors, default=1)


def _config(setting: Setting, split: Split, *, steps: int, scale: int) -> RunConfig:
    limits = c.Limits(episode_s=1e8, watchdog_s=1e8)
    if split.ahead == 0:
        buffer, staleness = c.NoBuffer(), c.Staleness()
    else:
        buffer, staleness = c.Window(window=1), c.Staleness(max=split.ahead)
    return RunConfig(
        run=c.Run(steps=steps, prompts_per_step=setting.prompts // scale, group_size=setting.group, seed=setting.seed),
        sampling=c.Sampling(max_tokens=1 << 24),
        buffer=buffer,
        staleness=staleness,
        sync=c.Shm(deadline_s=1e8),
        limits=limits,
        reward=c.Reward(functions=("exact_line",), deadline_s=1e8),
        checkpoint=c.Checkpoint(every=0),
    )


def _world(setting: Setting, split: Split, memory: MemoryUse, *, scale: int) -> World:
    learner = LearnerSpeed(
        model=setting.model,
        device=setting.device,
        ranks=split.training,
        simulated_ranks=split.training // scale,
        prompt_tokens=setting.prompt_tokens,
        minibatches=setting.minibatches,
        logprob_passes=setting.logprob_passes,
        recompute=setting.recompute,
    )
    return World(
        lengths=setting.lengths.drawer(setting.seed),
        speed=EngineSpeed(model=setting.model, device=setting.device, parallel=split.tensor_parallel),
        engines=split.replicas // scale,
        max_sequences=min(setting.max_sequences, memory.sequences),
        prompt_tokens=setting.prompt_tokens,
        turns=setting.turns,
        tool_s=setting.tool_s,
        score_s=setting.reward_s,
        reward_deadline_s=1e8,
        step_s=learner.step_s,
        export_s=Fixed(switch_s(setting) if split.colocated else export_s(setting, split)),
        deliver_s=Fixed(0.0 if split.colocated else deliver_s(setting, split)),
    )


def _step_seconds(run: Simulation) -> Sequence[float]:
    ends = [0.0, *(row["time/elapsed_s"] for _, row in run.sink.rows)]
    return [after - before for before, after in itertools.pairwise(ends)]
