"""Spawners start workers as their contract says, and leave nothing of them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import msgspec
import pytest

from corrente.common.local_spawner import open_local_spawner
from corrente.common.spawn import ANYWHERE, Spawner, Worker, WorkerPlace, WorkerRole
from corrente.errors import ConfigError
from corrente.testing import ContractError, SpawnerCase, check_spawner
from corrente.testing.spawners import ProbeCall, probe

CALLER = """
import os, sys, anyio, msgspec
from corrente.common.local_spawner import open_local_spawner
from corrente.common.spawn import WorkerRole
from corrente.testing.spawners import ProbeCall
async def main():
    async with open_local_spawner() as spawner:
        worker = await spawner.spawn(msgspec.json.decode(sys.argv[1], type=WorkerRole))
        print(await worker.call(ProbeCall(action="pid"), int), flush=True)
        await anyio.sleep_forever()
anyio.run(main)
"""


def exists(pid: int) -> bool:
    """Whether a process runs; one that only waits to be reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


async def abandon(role: WorkerRole) -> int:
    command = [sys.executable, "-c", CALLER, msgspec.json.encode(role).decode()]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as caller:
        assert caller.stdout is not None
        pid = int(await anyio.to_thread.run_sync(caller.stdout.readline))
        caller.kill()
    return pid


@asynccontextmanager
async def local() -> AsyncIterator[SpawnerCase]:
    before = {entry.name for entry in Path("/proc/self/fd").iterdir()}
    async with open_local_spawner() as spawner:
        yield SpawnerCase(spawner=spawner, exists=exists, abandon=abandon)
    assert {entry.name for entry in Path("/proc/self/fd").iterdir()} == before


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_local_spawner_keeps_the_contract(backend: str, tmp_path: Path) -> None:
    anyio.run(check_spawner, local, tmp_path, backend=backend)


def test_worker_that_nobody_stopped_ends_with_its_spawner() -> None:
    async def main() -> int:
        async with open_local_spawner() as spawner:
            worker = await spawner.spawn(probe())
            return await worker.call(ProbeCall(action="pid"), int)

    assert not exists(anyio.run(main))


def test_error_of_the_block_comes_out_as_it_is() -> None:
    async def main() -> None:
        async with open_local_spawner() as spawner:
            await spawner.spawn(probe())
            raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        anyio.run(main)


def test_host_that_it_cannot_reach_is_refused() -> None:
    async def main() -> None:
        async with open_local_spawner() as spawner:
            await spawner.spawn(probe(), place=WorkerPlace(host="gpu7"))

    with pytest.raises(ConfigError, match="probe: a worker on host 'gpu7' needs another spawner"):
        anyio.run(main)


def test_workers_inherit_the_descriptors_they_are_given() -> None:
    async def main() -> None:
        read, write = os.pipe()
        async with open_local_spawner() as spawner:
            await spawner.inheriting(write).spawn(probe())
            os.close(write)
            os.set_blocking(read, False)
            with pytest.raises(BlockingIOError):  # somebody still holds the other end
                os.read(read, 1)
        assert os.read(read, 1) == b""
        os.close(read)

    anyio.run(main)


class _Forgetful:
    """A worker that cannot be stopped. Implements Worker over another."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.label, self.call, self.ended = worker.label, worker.call, worker.ended

    @property
    def output(self) -> str:
        return self._worker.output

    async def stop(self, within_s: float) -> None:
        pass


class _Impatient(_Forgetful):
    """One that is killed at once."""

    async def stop(self, within_s: float) -> None:
        await self._worker.stop(0)


class _Changed:
    """A spawner whose workers break the contract. Implements Spawner over another."""

    def __init__(self, spawner: Spawner, change: Callable[[Worker], Worker]) -> None:
        self._spawner, self._change = spawner, change

    async def spawn(self, role: WorkerRole, *, place: WorkerPlace = ANYWHERE, log: Path | None = None) -> Worker:
        return self._change(await self._spawner.spawn(role, place=place, log=log))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "clause"), [(_Forgetful, "stop ends a worker"), (_Impatient, "a worker gets the time it was promised")]
)
def test_workers_that_break_the_contract_are_caught(
    change: Callable[[Worker], Worker], clause: str, tmp_path: Path
) -> None:
    @asynccontextmanager
    async def changed() -> AsyncIterator[SpawnerCase]:
        async with local() as case:
            yield SpawnerCase(spawner=_Changed(case.spawner, change), exists=exists)

    with pytest.raises(ContractError, match=clause):
        anyio.run(check_spawner, changed, tmp_path)
