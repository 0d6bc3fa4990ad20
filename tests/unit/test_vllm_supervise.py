"""The supervisor of a launched server, with shells in the server's place: nothing outlives its owner, whoever ends first."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import shared_memory
from pathlib import Path

import pytest

from corrente.engine.vllm import supervise

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="adopts orphans, and looks for them in /proc")

FAMILY = "sleep 600 & setsid sleep 600 & (setsid sleep 600 &) ; wait"
"""A child, one in a session of its own, and an orphan."""


def processes(mark: str) -> list[int]:
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit() and f"CORRENTE_TEST={mark}".encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
    return found


def until(true: Callable[[], bool]) -> None:
    limit = time.monotonic() + 10
    while not true():
        assert time.monotonic() < limit, "it did not happen"
        time.sleep(0.01)


@contextmanager
def supervised(folder: Path, script: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """The supervisor of a shell that runs ``script``, and what marks every process it starts."""
    folder.mkdir()
    (folder / "left").touch()
    mark = f"{os.getpid()}-{folder}"
    process = subprocess.Popen(
        [sys.executable, "-I", supervise.__file__, "0.2", str(folder), "sh", "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "CORRENTE_TEST": mark},
    )
    with process:
        yield process, mark
        process.kill()
    until(lambda: not processes(mark))


def test_all_processes_end_when_the_owner_lets_go(tmp_path: Path) -> None:
    with supervised(tmp_path / "x", FAMILY) as (process, mark):
        until(lambda: len(processes(mark)) == 5)
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(10) == 128 + signal.SIGTERM
        assert not processes(mark)
        assert not (tmp_path / "x").exists()


def test_the_owner_alone_ends_it(tmp_path: Path) -> None:
    """A service manager sends SIGTERM to every process of a run; the run goes on until it stops by itself."""
    with supervised(tmp_path / "x", FAMILY) as (process, mark):
        until(lambda: len(processes(mark)) == 5)
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
        assert len(processes(mark)) == 5
        assert process.stdin is not None
        process.stdin.close()
        process.wait(10)


def test_what_is_deaf_is_killed(tmp_path: Path) -> None:
    with supervised(tmp_path / "x", f"trap '' TERM; {FAMILY}") as (process, mark):
        until(lambda: len(processes(mark)) == 5)
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(10) == 128 + signal.SIGKILL
        assert not processes(mark)


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
    with supervised(tmp_path / "x", script) as (process, _):
        until(lambda: said.exists() and len(said.read_text().splitlines()) == 2)
        ours, theirs = said.read_text().split()
        kept = shared_memory.SharedMemory(theirs)
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(10) == 128 + signal.SIGKILL
        kept.close()
        kept.unlink()  # fails where it is gone
        with pytest.raises(FileNotFoundError):
            shared_memory.SharedMemory(ours)


def test_what_a_command_leaves_behind_ends_with_it(tmp_path: Path) -> None:
    with supervised(tmp_path / "x", "(setsid sleep 600 &); sleep 0.1; exit 7") as (process, mark):
        assert process.wait(10) == 7
        assert not processes(mark)
        assert not (tmp_path / "x").exists()


def test_a_command_that_loses_a_part_is_over_as_a_whole(tmp_path: Path) -> None:
    part = (
        f"{sys.executable} -c \"open('/proc/self/comm','w').write('VLLM::EngineCore'); __import__('time').sleep(600)\""
    )
    with supervised(tmp_path / "x", f"{part} & sleep 600 & wait") as (process, mark):
        named: list[int] = []

        def seen() -> bool:
            named[:] = [pid for pid in processes(mark) if supervise._state(pid)[0].startswith("VLLM::")]
            return bool(named)

        until(seen)
        time.sleep(3 * supervise._LOOK_S)
        os.kill(named[0], signal.SIGKILL)
        assert process.wait(10) == 128 + signal.SIGKILL
        assert process.stderr is not None
        assert f"process {named[0]} of the server ended" in process.stderr.read().decode()
        assert not processes(mark)


def test_the_command_dies_with_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    with supervised(tmp_path / "x", "exec sleep 600") as (process, mark):
        until(lambda: len(processes(mark)) == 2)
        process.kill()
        until(lambda: not processes(mark))


@pytest.mark.parametrize(
    ("script", "told"), [("exit 3", b"ended with exit code 3\n"), ("kill -9 $$", b"was killed by signal 9\n")]
)
def test_the_owner_is_told_how_it_ended(tmp_path: Path, script: str, told: bytes) -> None:
    with supervised(tmp_path / "x", script) as (process, _):
        assert process.stdout is not None
        assert process.stdout.read() == told
