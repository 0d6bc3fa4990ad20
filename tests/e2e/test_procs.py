"""Worker processes that behave, die, hang and are left alone: the controller always knows, and nothing is ever left behind."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from tests.e2e.left_behind import shared_memory, shared_memory_left

from corrente.config import Limits, Model, Pool, Procs, RunConfig
from corrente.data.types import Batch, Completion, Request, Sampling
from corrente.errors import ConfigError, DivergedError, GenerationError, PipelineError, WorkerDied
from corrente.runtime.base import Workers
from corrente.runtime.procs import ProcsRuntime
from corrente.sync.base import Update
from corrente.sync.offers import SharedOffer

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
KILL, RAISE, SPIN, REFUSE, STOP, EXIT, DIVERGE = -1, -2, -3, -4, -5, -6, -7


@pytest.fixture(autouse=True)
def _standins(monkeypatch: pytest.MonkeyPatch):
    """Workers find the stand-in cores where the controller does."""
    monkeypatch.syspath_prepend(HERE)


def _runtime(**given) -> ProcsRuntime:
    return ProcsRuntime(**{"engine": "fake_cores:engine", "learner": "fake_cores:learner", **given})


def _config(**given) -> RunConfig:
    """A run that an engine's death ends; what heals is tests/e2e/test_replicas.py's business."""
    return RunConfig(**{"limits": Limits(stop_s=5.0), "pool": Pool(restarts=0), **given})


def _request(order: int = 1, *, tokens: int = 3, name: str = "r") -> Request:
    return Request(id=name, tokens=np.array([order], np.int32), sampling=Sampling(max_tokens=tokens))


def _batch(order: int = 0) -> Batch:
    return Batch(step=order, version=0, rows=(), sequences=0, tokens=0)


def _workers_alive() -> dict[int, str]:
    """Living children of this process, by pid."""
    listed = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return {int(pid): Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ") for pid in listed}


def _pids() -> dict[str, int]:
    """Worker pids by name."""
    named = {match[1]: pid for pid, line in _workers_alive().items() if (match := re.search(r'"name":"(\w+)"', line))}
    assert set(named) == {"engine", "learner"}
    return named


def _footprint() -> tuple[set[str], set[int]]:
    """Open descriptors, and children."""
    return {entry.name for entry in Path("/proc/self/fd").iterdir()}, set(_workers_alive())


async def _serve(workers: Workers) -> None:
    """Have the engine serve; the stand-in has no weights that could be published."""
    engine: Any = workers.engine
    await engine.reserve(1)
    await engine.receive(SharedOffer(version=0, slot=1, nbytes=0))
    await engine.apply(Update(version=0, slot=1), "swap")


def _run(body: Callable[[Workers], Awaitable[None]], using: ProcsRuntime | None = None, **config) -> None:
    async def main() -> None:
        async with (using or _runtime()).open(_config(**config)) as workers:
            await _serve(workers)
            await body(workers)

    before, shared = _footprint(), shared_memory()
    try:
        anyio.run(main)
    finally:
        after = _footprint()
        assert after == before
        assert not shared_memory_left(shared)


def test_two_hundred_requests_at_once_each_get_their_own_answer():
    async def body(workers: Workers) -> None:
        answers: dict[int, Completion] = {}

        async def ask(number: int) -> None:
            answers[number] = await workers.engine.generate(_request(number, tokens=number % 7 + 1, name=f"r{number}"))

        async with anyio.create_task_group() as group:
            for number in range(1, 201):
                group.start_soon(ask, number)
        assert {n: (a.tokens.tolist()) for n, a in answers.items()} == {n: [n] * (n % 7 + 1) for n in range(1, 201)}

    _run(body)


def test_learner_that_computes_says_so_before_its_step_is_done():
    async def body(workers: Workers) -> None:
        before = workers.learner.progress()
        with anyio.fail_after(30):
            async with anyio.create_task_group() as group:
                group.start_soon(workers.learner.step, _batch(SPIN))
                while workers.learner.progress() == before:
                    await anyio.sleep(0.01)
                group.cancel_scope.cancel()

    _run(body)


def test_errors_of_a_worker_come_back_as_themselves_and_it_goes_on():
    async def body(workers: Workers) -> None:
        with pytest.raises(GenerationError, match="refused"):
            await workers.engine.generate(_request(REFUSE))
        with pytest.raises(DivergedError, match="loss is nan"):
            await workers.learner.step(_batch(DIVERGE))
        with pytest.raises(PipelineError, match="learner failed: ZeroDivisionError: told to"):
            await workers.learner.step(_batch(RAISE))
        with pytest.raises(PipelineError, match="learner failed: FileNotFoundError"):
            await workers.learner.save(Path("/nowhere"))
        assert (await workers.learner.step(_batch()))["steps"] == 1
        assert len((await workers.engine.generate(_request())).tokens) == 3

    _run(body)


def test_cancelled_request_is_ended_and_its_id_is_free_again():
    async def body(workers: Workers) -> None:
        with anyio.move_on_after(0.05):
            await workers.engine.generate(_request(tokens=10**9))
        assert len((await workers.engine.generate(_request(tokens=2))).tokens) == 2
        assert (await workers.engine.stats()).running == 0

    _run(body)


def test_aborted_requests_return_what_they_have():
    async def body(workers: Workers) -> None:
        partial: list[Completion] = []

        async def ask(name: str) -> None:
            partial.append(await workers.engine.generate(_request(tokens=10**9, name=name)))

        async with anyio.create_task_group() as group:
            group.start_soon(ask, "a")
            group.start_soon(ask, "b")
            while (await workers.engine.stats()).running < 2:
                pass
            await workers.engine.abort(["a", "b", "unknown"])
        assert [done.finish_reason for done in partial] == ["abort", "abort"]

    _run(body)


def test_learner_saves_and_loads_through_the_wire(tmp_path: Path):
    async def body(workers: Workers) -> None:
        await workers.learner.step(_batch())
        await workers.learner.save(tmp_path)
        assert (await workers.learner.step(_batch()))["steps"] == 2
        await workers.learner.load(tmp_path)
        assert (await workers.learner.step(_batch()))["steps"] == 2

    _run(body)


@pytest.mark.parametrize("victim", ["engine", "learner"])
def test_killed_worker_ends_the_run_within_a_second_and_is_named(victim: str):
    killed_at = 0.0
    noticed_at: list[float] = []

    async def waiting(call: Callable[[], Awaitable[object]]) -> None:
        try:
            await call()
        except WorkerDied:
            noticed_at.append(time.monotonic())  # by who waits for it; the other worker's end may take longer
            raise

    async def body(workers: Workers) -> None:
        nonlocal killed_at
        pid = _pids()[victim]
        async with anyio.create_task_group() as group:
            if victim == "engine":
                group.start_soon(waiting, lambda: workers.engine.generate(_request(tokens=10**9)))
            else:
                group.start_soon(waiting, lambda: workers.learner.step(_batch(SPIN)))
            await anyio.lowlevel.checkpoint()
            await workers.engine.stats()
            killed_at = time.monotonic()
            os.kill(pid, signal.SIGKILL)
            await anyio.sleep_forever()

    with pytest.raises(WorkerDied, match=rf"^{victim} \(pid \d+\) was killed by SIGKILL; it wrote nothing to stderr$"):
        _run(body)
    (noticed,) = noticed_at
    assert noticed - killed_at < 1.0


def test_idle_worker_that_is_killed_is_noticed_too():
    async def body(workers: Workers) -> None:
        os.kill(_pids()["learner"], signal.SIGKILL)
        await anyio.sleep_forever()

    with pytest.raises(WorkerDied, match="learner"):
        _run(body)


@pytest.mark.parametrize(
    ("order", "ending"),
    [
        (EXIT, r"exited with code 3; last output: so long / and thanks; see .*/logs/engine\.log$"),
        (RAISE, r"exited with code 1; last output: .*ZeroDivisionError: told to; see .*/logs/engine\.log$"),
        (KILL, r"was killed by SIGKILL; it wrote nothing to stderr; see .*/logs/engine\.log$"),
    ],
)
def test_worker_that_ends_by_itself_is_named_with_its_last_output_and_its_log(order: int, ending: str, tmp_path: Path):
    async def body(workers: Workers) -> None:
        await workers.engine.generate(_request(order))

    with pytest.raises(WorkerDied, match=ending):
        _run(body, _runtime(logs=tmp_path / "logs"))
    assert {file.name for file in (tmp_path / "logs").iterdir()} == {"engine.log", "learner.log"}


@pytest.mark.parametrize("order", [SPIN, STOP])
def test_stuck_worker_is_killed_within_the_bound(order: int):
    """A spinning worker ends when its socket closes, long before it would be killed; a stopped one hears nothing: it is."""
    left_at, stop_s = 0.0, 30.0 if order == SPIN else 1.0

    async def body(workers: Workers) -> None:
        nonlocal left_at
        with anyio.move_on_after(0.2):
            await workers.learner.step(_batch(order))
        left_at = time.monotonic()

    _run(body, limits=Limits(stop_s=stop_s))
    took = time.monotonic() - left_at
    assert took < 10.0 if order == SPIN else stop_s <= took < 10.0


def test_worker_that_dies_before_it_is_ready_is_named():
    async def body(workers: Workers) -> None:
        raise AssertionError("never")

    with pytest.raises(
        WorkerDied, match=r"^learner \(pid \d+\) exited with code 3; last output: so long / and thanks$"
    ):
        _run(body, _runtime(learner="fake_cores:leaves"))


def test_call_after_the_end_fails_at_once():
    kept: list[Workers] = []

    async def body(workers: Workers) -> None:
        kept.append(workers)

    _run(body)
    with pytest.raises(WorkerDied, match=r"^the engines were stopped$"):
        anyio.run(kept[0].engine.stats)


def test_workers_run_under_trio_as_well():
    async def main() -> None:
        async with _runtime().open(_config()) as workers:
            await _serve(workers)
            assert len((await workers.engine.generate(_request())).tokens) == 3
            os.kill(_pids()["learner"], signal.SIGKILL)
            await anyio.sleep_forever()

    before, shared = _footprint(), shared_memory()
    with pytest.raises(WorkerDied, match=r"^learner"):
        anyio.run(main, backend="trio")
    assert _footprint() == before
    assert not shared_memory_left(shared)


def test_error_of_the_body_comes_out_as_it_is():
    async def body(workers: Workers) -> None:
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        _run(body)


def test_refusal_at_the_start_comes_out_as_it_is():
    async def body(workers: Workers) -> None:
        raise AssertionError("never")

    with pytest.raises(ConfigError, match="'sand' is not to my taste"):
        _run(body, _runtime(learner="fake_cores:refuses"), model=Model(path="sand"))
    with pytest.raises(PipelineError, match="learner failed: ModuleNotFoundError: No module named 'nowhere'"):
        _run(body, _runtime(learner="nowhere:at_all"))


def test_worker_that_never_gets_ready_ends_at_the_deadline():
    async def body(workers: Workers) -> None:
        raise AssertionError("never")

    with pytest.raises(PipelineError, match=r"not ready after 0\.2 s; runtime\.start_deadline_s"):
        _run(body, _runtime(learner="fake_cores:hangs"), runtime=Procs(start_deadline_s=0.2))


@pytest.mark.parametrize(("placement", "cpus", "nice"), [("shared", 1.0, 1), ("pinned", 0.5, 1), ("priority", 1.0, 10)])
def test_placement_gives_the_learner_its_cores_and_priority(placement, cpus: float, nice: int):
    async def body(workers: Workers) -> None:
        metrics = await workers.learner.step(_batch())
        assert metrics["cpus"] == max(1, int(len(os.sched_getaffinity(0)) * cpus))
        assert metrics["nice"] == os.nice(0) + nice

    _run(body, runtime=Procs(placement=placement))


ORPHANS = """
import sys, os, anyio
sys.path[:0] = {path!r}
from corrente.config import RunConfig
from corrente.runtime.procs import ProcsRuntime
from corrente.data.types import Batch

async def main():
    async with ProcsRuntime(engine="fake_cores:engine", learner="fake_cores:learner").open(RunConfig()) as workers:
        sys.stdout.write(open(f"/proc/self/task/{{os.getpid()}}/children").read() + "\\n")
        sys.stdout.flush()
        await workers.learner.step(Batch(step=-3, version=0, rows=(), sequences=0, tokens=0))

anyio.run(main)
"""


def test_no_worker_outlives_a_controller_that_is_killed():
    """One worker is idle, the other in the middle of a computation that never ends."""
    code = ORPHANS.format(path=[str(HERE), *filter(None, sys.path)])
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as controller:
        assert controller.stdout is not None
        pids = [int(pid) for pid in controller.stdout.readline().split()]
        handles = [os.pidfd_open(pid) for pid in pids]
        controller.kill()
        killed_at = time.monotonic()
        for handle in handles:
            ended, _, _ = select.select([handle], [], [], 5.0)
            os.close(handle)
            assert ended
    assert len(pids) == 2
    assert time.monotonic() - killed_at < 1.0


def test_stopping_is_the_controllers_business():
    async def body(workers: Workers) -> None:
        for pid in _pids().values():
            for number in (signal.SIGINT, signal.SIGTERM):
                os.kill(pid, number)
        assert (await workers.learner.step(_batch()))["steps"] == 1
        await workers.engine.stats()

    _run(body)
