"""The supervisor of a launched server, with shells in the server's place: nothing outlives its caller, whoever ends first."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from multiprocessing import shared_memory
from pathlib import Path

import anyio
import pytest

from corrente.common.local_spawner import open_local_spawner
from corrente.common.spawn import Worker, WorkerRole
from corrente.engine.vllm import supervisor
from corrente.engine.vllm.launcher import SUPERVISOR_ROLE
from corrente.engine.vllm.supervisor import AwaitEnd

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="adopts orphans, and looks for them in /proc")

FAMILY = "sleep 600 & setsid sleep 600 & (setsid sleep 600 &) ; wait"
"""A child, one in a session of its own, and an orphan: with the shell and the supervisor five processes."""
MARK = "CORRENTE_TEST"


def processes(mark: str) -> list[int]:
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit() and f"{MARK}={mark}".encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
    return found


async def until(true: Callable[[], bool]) -> None:
    with anyio.fail_after(10):
        while not true():
            await anyio.sleep(0.01)


class Supervised:
    """A supervised shell: its worker, the mark of all its processes, and the folder that is its own."""

    def __init__(self, worker: Worker, mark: str, folder: Path) -> None:
        self.worker, self.mark, self.folder = worker, mark, folder

    @property
    def processes(self) -> list[int]:
        return processes(self.mark)

    @property
    def pid(self) -> int:
        """Of the supervisor."""
        found = re.search(r"pid (\d+)", self.worker.label)
        assert found is not None
        return int(found[1])


@contextmanager
def marked(folder: Path) -> Iterator[str]:
    """Have every process that is started in the block bear a mark."""
    os.environ[MARK] = f"{os.getpid()}-{folder}"
    try:
        yield os.environ[MARK]
    finally:
        del os.environ[MARK]


def role(folder: Path, script: str) -> WorkerRole:
    arguments = {"command": ["sh", "-c", script], "folder": str(folder), "packages": "", "token": "", "grace_s": 0.2}
    return WorkerRole(name="vllm-0", path=SUPERVISOR_ROLE, arguments=arguments, cleans_up=True)


@asynccontextmanager
async def supervised(folder: Path, script: str) -> AsyncIterator[Supervised]:
    """A supervisor of a shell that runs ``script``; none of its processes is left after the block."""
    folder.mkdir()
    (folder / "left").touch()
    async with open_local_spawner() as spawner:
        with marked(folder) as mark:
            worker = await spawner.spawn(role(folder, script))
        yield Supervised(worker, mark, folder)
    await until(lambda: not processes(mark))


def run(body: Callable[[], Awaitable[None]]) -> None:
    anyio.run(body)


def test_all_processes_end_when_the_caller_stops_it(tmp_path: Path) -> None:
    async def main() -> None:
        async with supervised(tmp_path / "x", FAMILY) as it:
            await until(lambda: len(it.processes) == 5)
            await it.worker.stop(10)
            assert not it.processes
            assert not it.folder.exists()

    run(main)


def test_caller_alone_ends_it(tmp_path: Path) -> None:
    """A service manager sends SIGTERM to every process of a run; the run goes on until it stops by itself."""

    async def main() -> None:
        async with supervised(tmp_path / "x", FAMILY) as it:
            await until(lambda: len(it.processes) == 5)
            for number in (signal.SIGTERM, signal.SIGINT):
                os.kill(it.pid, number)
            with anyio.move_on_after(0.5):
                await it.worker.call(AwaitEnd(), str)
                raise AssertionError("it ended")
            assert len(it.processes) == 5
            await it.worker.stop(10)

    run(main)


def test_server_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    async def main() -> None:
        async with supervised(tmp_path / "x", f"trap '' TERM; {FAMILY}") as it:
            await until(lambda: len(it.processes) == 5)
            await it.worker.stop(10)
            assert not it.processes
            assert not it.folder.exists()

    run(main)


SHARES = """
import os, sys, time
from multiprocessing import resource_tracker, shared_memory
made = [shared_memory.SharedMemory(create=True, size=64) for _ in range(2)]
for each in made:
    resource_tracker.unregister(each._name, "shared_memory")  # whom a kill takes along cleans up nothing
print(*(each.name for each in made), sep="\\n", file=open(sys.argv[1], "w", buffering=1))
time.sleep(600)
"""


def test_shared_memory_of_those_that_were_killed_goes_with_them(tmp_path: Path) -> None:
    """And that of others stays, though they had it open."""
    said = tmp_path / "said"
    script = f"trap '' TERM; {sys.executable} -c '{SHARES}' {said}"

    async def main() -> None:
        async with supervised(tmp_path / "x", script) as it:
            await until(lambda: said.exists() and len(said.read_text().splitlines()) == 2)
            ours, theirs = said.read_text().split()
            kept = shared_memory.SharedMemory(theirs)
            await it.worker.stop(10)
            kept.close()
            kept.unlink()  # fails where it is gone
            with pytest.raises(FileNotFoundError):
                shared_memory.SharedMemory(ours)

    run(main)


def test_what_a_server_leaves_behind_ends_with_it(tmp_path: Path) -> None:
    async def main() -> None:
        async with supervised(tmp_path / "x", "(setsid sleep 600 &); sleep 0.1; exit 7") as it:
            assert await it.worker.call(AwaitEnd(), str) == "ended with exit code 7"
            await until(lambda: it.processes == [it.pid])
            await until(lambda: not it.folder.exists())

    run(main)


def test_server_that_loses_a_part_is_over_as_a_whole(tmp_path: Path) -> None:
    part = (
        f"{sys.executable} -c \"open('/proc/self/comm','w').write('VLLM::EngineCore'); __import__('time').sleep(600)\""
    )

    async def main() -> None:
        async with supervised(tmp_path / "x", f"{part} & sleep 600 & wait") as it:
            named: list[int] = []

            def seen() -> bool:
                named[:] = [pid for pid in it.processes if supervisor.process_state(pid)[0].startswith("VLLM::")]
                return bool(named)

            await until(seen)
            await anyio.sleep(3 * supervisor.POLL_S)
            os.kill(named[0], signal.SIGKILL)
            assert await it.worker.call(AwaitEnd(), str) == "lost a process"
            await until(lambda: f"process {named[0]} of the server ended" in it.worker.output)
            await until(lambda: it.processes == [it.pid])

    run(main)


def test_server_dies_with_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    async def main() -> None:
        async with supervised(tmp_path / "x", "exec sleep 600") as it:
            await until(lambda: len(it.processes) == 2)
            os.kill(it.pid, signal.SIGKILL)
            await until(lambda: not it.processes)
            assert "was killed by SIGKILL" in str(await it.worker.ended())

    run(main)


@pytest.mark.parametrize(
    ("script", "report"), [("exit 3", "ended with exit code 3"), ("kill -9 $$", "was killed by signal 9")]
)
def test_caller_is_told_how_it_ended(tmp_path: Path, script: str, report: str) -> None:
    async def main() -> None:
        async with supervised(tmp_path / "x", script) as it:
            for _ in range(2):
                assert await it.worker.call(AwaitEnd(), str) == report

    run(main)


CONTROLLER = """
import sys, anyio
from pathlib import Path
from corrente.common.local_spawner import open_local_spawner
from tests.unit.test_vllm_supervisor import role
async def main():
    async with open_local_spawner() as spawner:
        await spawner.spawn(role(Path(sys.argv[1]), sys.argv[2]))
        print("started", flush=True)
        await anyio.sleep_forever()
anyio.run(main)
"""


def test_everything_ends_and_is_cleared_up_after_a_caller_that_is_killed(tmp_path: Path) -> None:
    folder = tmp_path / "x"
    folder.mkdir()
    with marked(folder) as mark:
        controller = subprocess.Popen(
            [sys.executable, "-c", CONTROLLER, str(folder), FAMILY],
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[2],
        )
    with controller:
        assert controller.stdout is not None
        assert controller.stdout.readline() == b"started\n"
        controller.kill()
    limit = time.monotonic() + 10
    while processes(mark) or folder.exists():
        assert time.monotonic() < limit
        time.sleep(0.01)
