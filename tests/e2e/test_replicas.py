"""Replicas as real processes: killed, stuck, replaced, joining and leaving; and publications through all of it."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from corrente.common import rpc
from corrente.common.serialization import decode
from corrente.config import Limits, Pool, Run, RunConfig, Shm
from corrente.data.types import Batch, Completion, Request, Sampling
from corrente.errors import WorkerDied
from corrente.runtime import handshake
from corrente.runtime.base import Workers
from corrente.runtime.handshake import Hello, Refused
from corrente.runtime.procs import ProcsRuntime
from corrente.sync.base import stage
from corrente.testing import SyncCase, check_sync

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
UNWELCOME = 99
Body = Callable[[Workers], Awaitable[None]]


@pytest.fixture(autouse=True)
def _standins(monkeypatch: pytest.MonkeyPatch):
    """Workers find the stand-in cores where the controller does."""
    monkeypatch.syspath_prepend(HERE)
    monkeypatch.setenv("PYTHONPATH", str(HERE), prepend=os.pathsep)


class News:
    """What was told about workers, and when."""

    def __init__(self) -> None:
        self.told: list[tuple[float, str]] = []

    def __call__(self, level: str, message: str) -> None:
        self.told.append((time.monotonic(), message))

    def when(self, pattern: str) -> float:
        """Of the first that matches."""
        return next(at for at, text in self.told if re.search(pattern, text))

    async def of(self, pattern: str, *, count: int = 1) -> None:
        while sum(bool(re.search(pattern, text)) for _, text in self.told) < count:
            await anyio.sleep(0.01)


def _children() -> dict[str, int]:
    """Pids of this process's workers, by name."""
    pids = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    lines = {int(pid): Path(f"/proc/{pid}/cmdline").read_text() for pid in pids}
    return {match[1]: pid for pid, line in lines.items() if (match := re.search(r'"name":"([\w-]+)"', line))}


def _footprint() -> tuple[set[str], set[str]]:
    """Open descriptors, and children."""
    return {entry.name for entry in Path("/proc/self/fd").iterdir()}, set(_children())


def _run(body: Callable[[Workers, News], Awaitable[None]], *, pool: Pool = Pool(replicas=2), **sections) -> News:  # noqa: B008
    news = News()
    config = RunConfig(**{"pool": pool, "limits": Limits(stop_s=5.0), **sections})

    async def main() -> None:
        with anyio.fail_after(240):
            runtime = ProcsRuntime(engine="one_weight_cores:engine", learner="one_weight_cores:learner")
            async with runtime.open(config, log_event=news) as workers:
                await body(workers, news)

    before = _footprint()
    try:
        anyio.run(main)
    finally:
        assert _footprint() == before
    return news


async def _publish(workers: Workers, version: int) -> None:
    await workers.sync.flip(await stage(workers.sync, version), "swap")


async def _step(workers: Workers, order: int = 0) -> None:
    await workers.learner.step(Batch(step=order, version=0, rows=(), sequences=0, tokens=0))


def _request(name: str, *, tokens: int, group: str = "") -> Request:
    sampling = Sampling(max_tokens=tokens)
    return Request(id=name, tokens=np.array([1], np.int32), sampling=sampling, group=group)


def _engine(workers: Workers) -> Any:
    return workers.engine


async def _ready(workers: Workers, count: int) -> None:
    while (await workers.engine.stats()).ready != count:
        await anyio.sleep(0.01)


@asynccontextmanager
async def _asking(workers: Workers, count: int, *, tokens: int) -> AsyncIterator[dict[str, Completion]]:
    """Requests under way beside the block, and their answers after it."""
    answers: dict[str, Completion] = {}

    async def ask(name: str) -> None:
        answers[name] = await workers.engine.generate(_request(name, tokens=tokens))

    async with anyio.create_task_group() as tasks:
        for at in range(count):
            tasks.start_soon(ask, f"r{at}")
        yield answers


def _check(answers: dict[str, Completion], *, count: int, tokens: int) -> None:
    """Whole, each once; a token's weight (its log-prob) is that of the version it is labelled with."""
    assert {name: len(done.tokens) for name, done in answers.items()} == {f"r{at}": tokens for at in range(count)}
    for done in answers.values():
        assert np.array_equal(done.logprobs, done.versions.astype(np.float32))


def test_one_of_two_killed_the_run_goes_on_within_a_second_and_it_comes_back_current():
    killed_s = 0.0

    async def body(workers: Workers, news: News) -> None:
        nonlocal killed_s
        await _publish(workers, 0)
        async with _asking(workers, 8, tokens=4000) as answers:
            await anyio.sleep(0.1)
            assert sorted(_engine(workers).states().values()) == ["READY", "READY"]
            killed_s = time.monotonic()
            os.kill(_children()["engine-0"], signal.SIGKILL)
            await news.of("killed by SIGKILL")
            await _step(workers)
            await _publish(workers, 1)
            await anyio.sleep(0)
        _check(answers, count=8, tokens=4000)
        await _ready(workers, 2)
        assert await _versions(workers) == [1, 1]
        await _step(workers)
        await _publish(workers, 2)
        assert await _versions(workers) == [2, 2]

    news = _run(body)
    assert (
        news.when(r"^engine-0 \(pid \d+\) was killed by SIGKILL; it wrote nothing to stderr; another replica is ready")
        - killed_s
        < 1.0
    )
    assert news.told[-1][1] == "engine-0 is ready, at version 1"


async def _versions(workers: Workers) -> list[int]:
    members = list(_engine(workers).roster.members.values())
    return [(await member.engine.stats()).version for member in members]


def test_only_engine_is_replaced_and_what_it_was_at_is_sampled_again():
    async def body(workers: Workers, news: News) -> None:
        await _publish(workers, 0)
        async with _asking(workers, 4, tokens=5000) as answers:
            await anyio.sleep(0.05)
            os.kill(_children()["engine"], signal.SIGKILL)
        _check(answers, count=4, tokens=5000)

    _run(body, pool=Pool(replicas=1))


def test_last_death_ends_the_run_with_its_name():
    async def body(workers: Workers, news: News) -> None:
        await _publish(workers, 0)
        for name in ("engine-0", "engine-1"):
            os.kill(_children()[name], signal.SIGKILL)
        await anyio.sleep(5)
        raise AssertionError("still running")

    with pytest.raises(
        WorkerDied, match=r"^engine-[01] \(pid \d+\) was killed by SIGKILL; it wrote nothing to stderr$"
    ):
        _run(body, pool=Pool(replicas=2, restarts=0))


def test_learners_death_still_ends_the_run_at_once():
    async def body(workers: Workers, news: News) -> None:
        os.kill(_children()["learner"], signal.SIGKILL)
        await anyio.sleep(5)
        raise AssertionError("still running")

    with pytest.raises(WorkerDied, match=r"^learner"):
        _run(body)


def test_stopped_replica_is_given_up_at_its_deadline_and_the_others_flip():
    async def body(workers: Workers, news: News) -> None:
        await _publish(workers, 0)
        async with _asking(workers, 4, tokens=3000) as answers:
            await anyio.sleep(0.05)
            os.kill(_children()["engine-1"], signal.SIGSTOP)
            await _step(workers)
            await _publish(workers, 1)
        _check(answers, count=4, tokens=3000)
        assert (await workers.engine.stats()).version == 1
        await _ready(workers, 2)

    news = _run(body, sync=Shm(deadline_s=2.0), limits=Limits(stop_s=1.0))
    assert news.when("^engine-1 (did not .* within|did not answer for) 1 s, and was given up")


def test_sync_over_two_real_replicas_keeps_its_contract():
    async def body(workers: Workers, news: News) -> None:
        @asynccontextmanager
        async def make() -> AsyncIterator[SyncCase]:
            yield SyncCase(sync=workers.sync, versions=lambda: _versions(workers))

        await check_sync(make)

    _run(body)


def test_what_every_replica_refuses_changes_nothing():
    async def body(workers: Workers, news: News) -> None:
        await _publish(workers, 0)
        await _step(workers)
        with pytest.raises(
            Exception, match=r"no replica could apply version 99: engine-0: .*this one will not do; engine-1:"
        ):
            await _publish(workers, UNWELCOME)
        async with _asking(workers, 2, tokens=3) as answers:
            pass
        _check(answers, count=2, tokens=3)
        await _publish(workers, 1)
        assert await _versions(workers) == [1, 1]

    _run(body)


# ---- joining


@contextmanager
def _guest(folder: Path, *more: str) -> Iterator[subprocess.Popen[str]]:
    command = [str(Path(sys.executable).parent / "corrente"), "engine", "--join", str(folder), *more]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as guest:
        try:
            yield guest
        finally:
            if guest.poll() is None:
                guest.kill()


async def _end_of(guest: subprocess.Popen[str]) -> tuple[int, str]:
    out, err = await anyio.to_thread.run_sync(lambda: guest.communicate(timeout=20))
    return guest.returncode, out + err


def _open_to_guests(folder: Path) -> dict[str, Any]:
    return {"pool": Pool(replicas=1, join=True), "run": Run(dir=str(folder.parent), name=folder.name)}


def test_engine_joins_is_published_to_and_leaves_with_nothing_lost(tmp_path: Path):
    folder = tmp_path / ("a long name of a folder " * 8) / "run"
    folder.mkdir(parents=True)
    (folder / handshake.SOCKET).write_text("left behind by a run that was killed")

    async def body(workers: Workers, news: News) -> None:
        await _publish(workers, 0)
        assert {(folder / name).stat().st_mode & 0o777 for name in (handshake.SOCKET, handshake.TOKEN)} == {0o600}
        with _guest(folder) as guest:
            await _ready(workers, 2)
            await _step(workers)
            await _publish(workers, 1)
            assert await _versions(workers) == [1, 1]
            async with _asking(workers, 4, tokens=4000) as answers:
                with anyio.fail_after(30):
                    while {len(member.calls) for member in _engine(workers).roster.members.values()} != {2}:
                        await anyio.sleep(0.001)
                guest.send_signal(signal.SIGINT)
            _check(answers, count=4, tokens=4000)
            code, said = await _end_of(guest)
            assert code == 0
            assert "joining as joined-1" in said
            assert said.count("left the run; what was under way goes on in other engines") == 1
        await _ready(workers, 1)

    news = _run(body, **_open_to_guests(folder))
    assert [text for _, text in news.told] == [
        "joined-1 joined",
        "joined-1 is ready, at version 0",
        "joined-1 left; what it was at goes on elsewhere",
    ]
    assert not list(folder.iterdir())


def test_guest_that_is_killed_is_not_missed_and_one_ends_with_the_run(tmp_path: Path):
    stayed: list[subprocess.Popen[bytes]] = []
    said = tmp_path / "said"

    async def body(workers: Workers, news: News) -> None:
        await _publish(workers, 0)
        with _guest(tmp_path) as guest:
            await _ready(workers, 2)
            async with _asking(workers, 4, tokens=4000) as answers:
                await anyio.sleep(0.1)
                guest.kill()
            _check(answers, count=4, tokens=4000)
        command = [str(Path(sys.executable).parent / "corrente"), "engine", "--join", str(tmp_path)]
        with said.open("w") as file:
            stayed.append(subprocess.Popen(command, stderr=file))
        await _ready(workers, 2)

    _run(body, **_open_to_guests(tmp_path))
    assert stayed[0].wait(timeout=10) == 0
    assert said.read_text().endswith("the run has ended\n")


def test_who_does_not_fit_is_told_so_in_one_line_and_the_run_goes_on(tmp_path: Path):
    async def body(workers: Workers, news: News) -> None:
        await _publish(workers, 0)
        other = tmp_path / "model"
        other.mkdir()
        (other / "config.json").write_text("{}")
        with _guest(tmp_path / "run", "--model", str(other)) as guest:
            assert await _end_of(guest) == (2, "corrente: --join: another model: the run has that of sand\n")
        token = (tmp_path / "run" / handshake.TOKEN).read_text()
        assert await _greet(tmp_path / "run", Hello(token=token, pid=1, version="0")) == Refused(
            why=f"the run is of corrente {Hello(token='', pid=1).version}, this is 0", wrong=True
        )
        (tmp_path / "run" / handshake.TOKEN).write_text("another")
        with _guest(tmp_path / "run") as guest:
            code, said = await _end_of(guest)
        assert (code, said.count("\n")) == (1, 1)
        assert "the token is not this run's" in said
        for noise in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 100, rpc.frame(Refused(why="no, you"))):
            await _shout(tmp_path / "run", noise)
        async with _asking(workers, 1, tokens=3) as answers:
            pass
        _check(answers, count=1, tokens=3)

    from corrente.config import Model

    _run(body, model=Model(path="sand"), **_open_to_guests(tmp_path / "run"))


def test_folder_without_a_run_is_refused_in_one_line(tmp_path: Path):
    for folder, code in ((tmp_path, 1), (tmp_path / "nowhere", 2)):
        with _guest(folder) as guest:
            _, said = guest.communicate(timeout=20)
        assert guest.returncode == code
        assert said.startswith("corrente: ")
        assert said.count("\n") == 1


async def _shout(folder: Path, noise: bytes) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection, handshake.socket_path(folder) as path:
        connection.connect(path)
        connection.sendall(noise)
    await anyio.sleep(0.05)


async def _greet(folder: Path, hello: Hello) -> Any:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection, handshake.socket_path(folder) as path:
        connection.connect(path)
        connection.sendall(rpc.frame(hello))
        connection.setblocking(False)
        await anyio.wait_readable(connection)
        return decode(rpc.FrameReader().feed(connection.recv(1 << 16))[0], Refused)
