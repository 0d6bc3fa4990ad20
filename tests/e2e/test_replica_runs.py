"""Whole runs on replicas of the embedded engine, with a tiny model: the contract, and a run some of whose engines are killed."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from tests.e2e.test_replicas import _children
from tests.e2e.test_runs import Record, run
from tests.e2e.tiny import tiny_config
from tests.numerics.tiny_engine import CONTEXT, tiny

from corrente.config import Embedded, Model, Pool, RunConfig
from corrente.entrypoints.run_folder import run_folder_path
from corrente.errors import WorkerDied
from corrente.runtime.procs import ProcsRuntime
from corrente.sync.base import stage
from corrente.testing import EngineCase, check_engine

pytestmark = pytest.mark.slow

PROCS = ("runtime.kind=procs", "sync.kind=shm")
PROMPT = np.arange(20, 30, dtype=np.int32)


def test_two_embedded_engines_keep_the_contract_of_one(tmp_path: Path):
    _, model, _ = tiny("llama")
    model.save_pretrained(tmp_path)
    config = RunConfig(model=Model(path=str(tmp_path)), engine=Embedded(max_context=CONTEXT), pool=Pool(replicas=2))

    async def main() -> None:
        async with ProcsRuntime().open(config) as workers:
            engine: Any = workers.engine

            @asynccontextmanager
            async def make() -> AsyncIterator[EngineCase]:
                yield EngineCase(
                    engine=engine,
                    stage=partial(stage, workers.sync),
                    flip=workers.sync.flip,
                    prompt=PROMPT,
                    context=CONTEXT,
                    long_tokens=80,
                )

            await check_engine(make)
            assert set(engine.states().values()) == {"READY"}

    anyio.run(main)


def test_run_survives_the_death_of_either_engine_and_trains_every_prompt_once(tmp_path: Path):
    killed: list[str] = []

    def kill(step: int) -> None:
        if step in (3, 9) and (name := f"engine-{len(killed)}") in _children():
            killed.append(name)
            os.kill(_children()[name], signal.SIGKILL)

    config = tiny_config(tmp_path, *PROCS, "pool.replicas=2", "run.steps=14", "observe.samples=1000", "eval.every=0")
    outcome, record = run(config, sink=Record(kill))
    trained = [sample["prompt_id"] for sample in record.samples]
    assert (outcome.ended, outcome.steps, outcome.version) == ("steps", 14, 14)
    assert killed
    assert (outcome.counts["trained"], outcome.counts["failed"]) == (28, 0)
    assert len(trained) == 28 * 4
    assert {trained.count(name) for name in trained} == {4}
    assert max(step["lag/max"] for step in record.steps) <= record.steps[0]["lag/bound"]
    assert record.steps[0]["mismatch/logprob_gap_max"] < 1e-4
    assert record.steps[0]["engine/ready"] == 2
    for name in killed:
        assert any(text.startswith(f"{name} (pid ") and "killed by SIGKILL" in text for text in record.events)


def test_run_whose_engines_all_die_ends_with_the_death_of_the_last_and_names_its_log(tmp_path: Path):
    def kill(step: int) -> None:
        if step == 2:
            for name in ("engine-0", "engine-1"):
                os.kill(_children()[name], signal.SIGKILL)

    config = tiny_config(tmp_path, *PROCS, "pool.replicas=2", "pool.restarts=0", "eval.every=0")
    with pytest.raises(WorkerDied, match=r"^engine-[01] \(pid \d+\) was killed by SIGKILL; .*; see (.*)$") as caught:
        run(config, sink=Record(kill))
    log = Path(str(caught.value).partition("; see ")[2])
    assert log.parent == run_folder_path(config) / "logs"
    assert {file.name for file in log.parent.iterdir()} == {"engine-0.log", "engine-1.log", "learner.log"}
    assert not _children()


def test_which_replicas_there_are_decides_nothing_about_what_is_sampled(tmp_path: Path):
    """The first batch, all of version 0, is the same for one engine and for two."""
    texts = {}
    for replicas in (1, 2):
        overrides = (
            *PROCS,
            f"pool.replicas={replicas}",
            "run.steps=2",
            "eval.every=0",
            "observe.samples=1000",
            "buffer.kind=none",
        )
        _, record = run(tiny_config(tmp_path, *overrides))
        first = [s for s in record.samples if s["versions"] == [0]]
        texts[replicas] = {(s["prompt_id"], s["completion"]) for s in first}
    assert len(texts[1]) > 4
    assert texts[1] == texts[2]
