"""Every transport between real processes: a learner, and two engines that go on generating while versions arrive."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import anyio.to_thread
import numpy as np
import pytest

from corrente import config as c
from corrente.common.events import LogEvent, ignore_event
from corrente.data.types import Batch, Request, Row, Sampling
from corrente.errors import SyncError
from corrente.runtime.base import Workers
from corrente.runtime.procs import ProcsRuntime
from corrente.sync.base import stage
from corrente.testing import SyncCase, check_sync

pytestmark = pytest.mark.slow

SECTIONS = {
    "shm": c.Shm(),
    "disk": c.Disk(payload="delta", anchor_every=3),
    "http": c.Http(payload="delta", anchor_every=3),
    "collective": c.Collective(),
}
HELD, HOLD = -9, "hold"
"""See weighted.py."""


@pytest.fixture(autouse=True)
def _cores(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(Path(__file__).parent)


def _open(section: object, folder: Path, *, log_event: LogEvent = ignore_event):
    config = c.RunConfig(sync=section, run=c.Run(dir=str(folder)), pool=c.Pool(replicas=2))  # pyright: ignore
    return ProcsRuntime(engine="one_weight_cores:engine", learner="one_weight_cores:learner").open(
        config, log_event=log_event
    )


async def _step(workers: Workers) -> float:
    return (await workers.learner.step(Batch(step=0, version=0, rows=(), sequences=0, tokens=0)))["weight"]


@pytest.mark.parametrize("kind", SECTIONS)
def test_tokens_carry_the_version_whose_weights_sampled_them(kind: str, tmp_path: Path):
    """Eight long sequences on two engines, five publishes meanwhile: no token has another version's weight."""

    async def main() -> None:
        weights: dict[int, float] = {}
        seen: dict[int, set[float]] = {}

        async def ask(workers: Workers, number: int) -> None:
            request = Request(id=str(number), tokens=np.array([1], np.int32), sampling=Sampling(max_tokens=10**9))
            done = await workers.engine.generate(request)
            for version, weight in zip(done.versions.tolist(), done.logprobs.tolist(), strict=True):
                seen.setdefault(version, set()).add(weight)

        async with _open(SECTIONS[kind], tmp_path) as workers, anyio.create_task_group() as tasks:
            for version in range(6):
                weights[version] = await _step(workers)
                await workers.sync.flip(await stage(workers.sync, version), "swap")
                if version == 0:
                    for number in range(8):
                        tasks.start_soon(ask, workers, number)
                await workers.engine.stats()
            await workers.engine.abort([str(number) for number in range(8)])
        assert len(seen) >= 3
        assert seen == {version: {weights[version]} for version in seen}

    anyio.run(main)


@pytest.mark.parametrize("kind", SECTIONS)
def test_delivery_does_not_wait_for_the_step_that_the_learner_is_at(kind: str, tmp_path: Path):
    """It ends before the step does, and what arrives is what was exported."""
    os.mkfifo(tmp_path / HOLD)

    async def main() -> None:
        async with _open(SECTIONS[kind], tmp_path) as workers, anyio.create_task_group() as tasks:
            for version in range(2):
                exported = await _step(workers)
                await workers.sync.export(version)
                held = Batch(step=HELD, version=0, rows=(), sequences=0, tokens=0)
                tasks.start_soon(workers.learner.step, held)
                writer = await anyio.to_thread.run_sync(os.open, tmp_path / HOLD, os.O_WRONLY)  # the step has begun
                update = await workers.sync.deliver(version)
                assert (await workers.engine.stats()).version == version - 1
                await workers.sync.flip(update, "swap")
                assert (await workers.engine.score(np.arange(3, dtype=np.int32))).logprobs.tolist() == [exported] * 2
                os.close(writer)
            stats = workers.sync.stats()
            assert 0 <= stats["publish/copy_s"] <= stats["publish/export_s"]
            assert 0 < stats["publish/deliver_s"] < stats["publish/stage_s"]

    anyio.run(main)


@pytest.mark.parametrize("kind", [kind for kind in SECTIONS if kind != "shm"])
def test_sync_between_processes_keeps_its_contract(kind: str, tmp_path: Path):
    async def main() -> None:
        async with _open(SECTIONS[kind], tmp_path) as workers:

            async def versions() -> list[int]:
                return [(await workers.engine.stats()).version]

            @asynccontextmanager
            async def make() -> AsyncIterator[SyncCase]:
                yield SyncCase(sync=workers.sync, versions=versions)

            await check_sync(make)

    anyio.run(main)


@pytest.mark.parametrize(
    ("kind", "dtype"), [("shm", "float32"), ("disk", "bfloat16"), ("http", "float32"), ("collective", "bfloat16")]
)
def test_engine_scores_as_the_learners_saved_model_does(kind: str, dtype: str, tmp_path: Path):
    """A tiny Llama with tied embeddings: after steps and publishes, both engines agree with transformers on the checkpoint."""
    import tiny
    import torch
    from transformers import AutoModelForCausalLM

    tokens = np.array([3, 5, 2, 7, 4, 6, 8, 2], np.int32)

    def rows(step: int) -> Batch:
        mask = np.arange(len(tokens)) >= 3
        row = Row(
            group=0,
            tokens=tokens,
            loss_mask=mask,
            logprobs=np.where(mask, -2.0, 0.0).astype(np.float32),
            versions=np.zeros(len(tokens), np.int32),
            advantages=np.ones(len(tokens), np.float32),
        )
        return Batch(step=step, version=0, rows=(row,), sequences=1, tokens=int(mask.sum()))

    def reference(folder: Path) -> list[float]:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
        ids = torch.from_numpy(tokens).long()
        with torch.no_grad():
            logprobs = model(ids[None]).logits[0, :-1].float().log_softmax(-1)
        return logprobs[torch.arange(len(ids) - 1), ids[1:]].tolist()

    async def main() -> None:
        model = tiny.write_model(tmp_path / "model")
        config = c.RunConfig(
            run=c.Run(dir=str(tmp_path)),
            model=c.Model(path=str(model), dtype=dtype),  # pyright: ignore
            sync=SECTIONS[kind],  # pyright: ignore
            learner=c.LearnerConfig(lr=1e-2),
        )
        async with ProcsRuntime().open(config) as workers:
            for version in range(5):
                await workers.sync.flip(await stage(workers.sync, version), "swap")
                (tmp_path / f"v{version}").mkdir()
                await workers.learner.save(tmp_path / f"v{version}")
                scored = (await workers.engine.score(tokens)).logprobs.tolist()
                tolerance = 1e-5 if dtype == "float32" else 0.05
                assert scored == pytest.approx(reference(tmp_path / f"v{version}"), abs=tolerance)
                await workers.learner.step(rows(version))

    anyio.run(main)


@pytest.mark.parametrize("kind", ["disk", "http", "collective"])
def test_engine_that_is_killed_costs_no_version_and_its_successor_is_caught_up(kind: str, tmp_path: Path):
    """Publishes go on over the engine that is left; the new one gets the live version, and then every next one."""

    async def main() -> None:
        killed, back = anyio.Event(), anyio.Event()
        pids: list[int] = []

        def log_event(level: str, message: str) -> None:
            if killed.is_set() and "engine-1 is ready" in message:
                back.set()

        async def publish(workers: Workers, version: int) -> None:
            await _step(workers)
            for _ in range(3):
                try:
                    await workers.sync.flip(await stage(workers.sync, version), "swap")
                    return
                except SyncError:
                    await anyio.lowlevel.checkpoint()
            raise AssertionError(f"version {version} was not published in three attempts")

        async with _open(SECTIONS[kind], tmp_path, log_event=log_event) as workers:
            for version in range(3):
                await publish(workers, version)
            found = subprocess.run(
                ["pgrep", "-P", str(os.getpid()), "-f", '"name":"engine-1"'], capture_output=True, text=True, check=True
            )
            pids += map(int, found.stdout.split())
            os.kill(pids[0], signal.SIGKILL)
            killed.set()
            for version in range(3, 6):
                await publish(workers, version)
            with anyio.fail_after(120):
                await back.wait()
            for version in range(6, 10):
                await publish(workers, version)
                request = Request(id="r", tokens=np.array([1], np.int32), sampling=Sampling(max_tokens=1))
                served = [await workers.engine.generate(request) for _ in range(4)]
                assert {(int(done.versions[0]), float(done.logprobs[0])) for done in served} == {(version, version + 1)}
            assert workers.engine.members() == 2  # pyright: ignore

    anyio.run(main)


@pytest.mark.parametrize("kind", ["disk", "http", "collective"])
def test_run_trains_to_its_end_and_leaves_what_it_should(kind: str, tmp_path: Path):
    import tiny

    from corrente.entrypoints.checks import check_config
    from corrente.entrypoints.inputs import RunInputs
    from corrente.entrypoints.train import run_training

    payload = [] if kind == "collective" else ["sync.payload=delta"]
    config = tiny.tiny_config(tmp_path, "runtime.kind=procs", f"sync.kind={kind}", *payload)
    check_config(config)
    given = RunInputs(reward_functions=[tiny.answer_fraction])
    outcome = anyio.run(lambda: run_training(config, inputs=given))
    assert (outcome.ended, outcome.version) == ("steps", 6)
    assert outcome.counts["trained"] == 12
    kept = sorted(entry.name[:9] for entry in (tmp_path / "runs" / "tiny").glob("weights/v*"))
    assert kept == (["v00000005", "v00000006"] if kind == "disk" else [])
