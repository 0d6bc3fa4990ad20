"""The virtual parts keep the contracts that real ones do, so what the simulations show holds for both."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from corrente.sim.distributions import Fixed, LogNormal
from corrente.sim.engine import VirtualEngine
from corrente.sim.faults import Chaos, Fault
from corrente.sim.parts import (
    RecordingSink,
    VirtualAlgorithm,
    VirtualEnv,
    VirtualLearner,
    VirtualPrompts,
    VirtualScorer,
    VirtualSync,
)
from corrente.sim.pool import VirtualPool
from corrente.sim.speed import Speed
from corrente.sync.base import InPlace, Update
from corrente.testing import (
    EngineCase,
    LearnerCase,
    SyncCase,
    check_engine,
    check_env,
    check_learner,
    check_prompts,
    check_scorer,
    check_sink,
    check_sync,
    run_virtual,
    samples,
)


def _engine(chaos: Chaos | None = None) -> VirtualEngine:
    return VirtualEngine(
        lengths=Fixed(1000), speed=Speed(prefill_token_s=0.001, flip_s=0.01), max_context=256, chaos=chaos
    )


def _case(engine: VirtualEngine | VirtualPool) -> EngineCase:
    async def stage(version: int) -> Update:
        slot = version % 2
        await engine.reserve(slot)
        await engine.receive(InPlace(version=version, slot=slot, nbytes=0))
        return Update(version=version, slot=slot)

    return EngineCase(
        engine=engine, stage=stage, broken=stage, prompt=np.arange(8, dtype=np.int32), context=256, tick_s=0.01
    )


class _FourthVersionBreaksOnce(Chaos):
    """Version 4 fails the first time it is applied."""

    def __init__(self) -> None:
        super().__init__()
        self._once = Chaos(Fault(stage="apply", calls=(0,)))

    async def strike(self, stage, key, error) -> None:
        if stage == "apply" and key == "4":
            await self._once.strike(stage, key, error)


@asynccontextmanager
async def _one_engine() -> AsyncGenerator[EngineCase]:
    async with _engine(_FourthVersionBreaksOnce()).running() as engine:
        yield _case(engine)


@asynccontextmanager
async def _two_engines() -> AsyncGenerator[EngineCase]:
    async with _engine(_FourthVersionBreaksOnce()).running() as one, _engine().running() as two:
        yield _case(VirtualPool([one, two]))


@pytest.mark.parametrize("make", [_one_engine, _two_engines])
def test_virtual_engines_keep_the_contract(make) -> None:
    run_virtual(check_engine, make, limit_s=10_000)


@asynccontextmanager
async def _sync_of_two() -> AsyncGenerator[SyncCase]:
    async with _engine().running() as one, _engine().running() as two:
        breaking: list[str] = []

        class BreakNext(Chaos):
            async def strike(self, stage, key, error) -> None:
                if stage in breaking:
                    breaking.remove(stage)
                    raise error(f"{stage} broke")

        sync = VirtualSync(VirtualPool([one, two]), chaos=BreakNext())

        async def versions() -> list[int]:
            return [(await engine.stats()).version for engine in (one, two)]

        yield SyncCase(sync=sync, versions=versions, break_next=breaking.append)


def test_virtual_sync_keeps_the_contract() -> None:
    run_virtual(check_sync, _sync_of_two, limit_s=10_000)


def test_virtual_learner_keeps_the_contract(tmp_path: Path) -> None:
    batch = VirtualAlgorithm().batch([samples.group(rewards=(0.0, 1.0))], step=0, version=0, oldest_trainable=[None])

    @asynccontextmanager
    async def make() -> AsyncGenerator[LearnerCase]:
        learner = VirtualLearner()
        yield LearnerCase(learner=learner, batch=batch, fingerprint=lambda: learner.state)

    run_virtual(check_learner, make, tmp_path, limit_s=10_000)
    assert json.loads((tmp_path / "good" / "learner.json").read_text()) == {"state": 1}


@pytest.mark.parametrize("epochs", [0, 1, 3])
def test_virtual_prompts_keep_the_contract(epochs: int) -> None:
    check_prompts(lambda: VirtualPrompts(rows=12, epochs=epochs))


def test_virtual_env_keeps_the_contract() -> None:
    for turns in (1, 3):
        run_virtual(check_env, lambda turns=turns: VirtualEnv(turns=turns, tool_s=Fixed(5.0)), samples.prompt(id="0/3"))


def test_virtual_scorer_keeps_the_contract() -> None:
    subject = samples.group(size=4)
    run_virtual(check_scorer, lambda: VirtualScorer(latency_s=LogNormal(median=1.0)), subject)
    broken = Chaos(Fault(stage="score", key="*#1"), Fault(stage="score", kind="hang", key="*#2"))
    run_virtual(check_scorer, lambda: VirtualScorer(chaos=broken, deadline_s=5.0), subject, limit_s=60)


def test_recording_sink_keeps_the_contract() -> None:
    check_sink(RecordingSink)
