"""The role of a worker that runs a vLLM server, and ends all of it.

A server is several processes, with shared memory and sockets. When the worker is told to end, or its caller is gone, however
that ended, or when the server ends by itself, every process that is left is ended too (SIGTERM, after ``grace_s`` SIGKILL).
``folder``, where they keep temporary files, is removed, and so is the shared memory that they had no time to remove. The same
when one of the processes ends whose title begins with PART: a server is over as a whole, and at once.

On Linux the worker adopts orphans of the server, and the server dies with it; elsewhere processes that the server started in
sessions of their own are not found.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from corrente.common import rpc
from corrente.common.child_process import dying_with_us
from corrente.common.rpc_server import Send
from corrente.engine.vllm import environment

_PR_SET_CHILD_SUBREAPER = 36
_LINUX = sys.platform == "linux"
POLL_S = 0.05
_POLLS = 100
"""Polls between two scans of mapped memory, which take some milliseconds."""
_SHARED = "/dev/shm/"
_PF_EXITING = 0x4
PART = "VLLM::"


class AwaitEnd(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Answered with how the server ended, in words, when it has: before anything is cleared up, because freeing gigabytes takes
    longer than the caller should wait to know."""


SupervisorRequest = AwaitEnd | rpc.CancelCall


class SupervisorRole:
    """Runs ``command``. Its environment is that of vLLM (environment.variables), with ``token`` to be asked for, ``packages`` to
    import from, and ``folder`` for temporary files."""

    requests: Any = SupervisorRequest

    def __init__(
        self, send: Send, *, command: Sequence[str], folder: str, packages: str, token: str, grace_s: float
    ) -> None:
        self._send, self._folder, self._grace_s = send, Path(folder), grace_s
        if _LINUX:
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
        self._process = subprocess.Popen(
            dying_with_us(command),
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,
            start_new_session=True,
            env=environment.variables(token, packages=Path(packages), scratch=self._folder),
        )
        self._shared = _SharedMemoryFiles()
        self._parts: set[int] = set()
        self._polls = 0
        self._waiting: list[int] = []
        self._how = ""
        self._told_to_end = threading.Event()
        self._cleared_up = threading.Event()

    @property
    def busy(self) -> bool:
        return not self._cleared_up.is_set()

    def handle(self, call: rpc.RpcCall[SupervisorRequest]) -> rpc.RpcAnswer | None:
        match call.body:
            case AwaitEnd() if self._how:
                return rpc.reply(call.id, self._how)
            case AwaitEnd():
                self._waiting.append(call.id)
            case rpc.CancelCall(call=number):
                self._waiting = [waiting for waiting in self._waiting if waiting != number]
        return None

    def work(self) -> list[rpc.RpcAnswer]:
        """Watch the server for a moment; once it has ended, clear up."""
        if self._cleared_up.is_set() or (status := self._poll()) is None:
            return []
        self._report(f"ended with exit code {status}" if status >= 0 else f"was killed by signal {-status}")
        self._shared.scan()
        _sweep(self._process.pid)
        self._shared.remove()
        shutil.rmtree(self._folder, ignore_errors=True)
        self._cleared_up.set()
        return []

    def close(self) -> None:
        """See Role. End the server; the computing thread, in ``work``, clears up."""
        if self._cleared_up.is_set():
            return
        self._told_to_end.set()
        self._shared.scan()
        _signal(self._process.pid, signal.SIGTERM)
        if not self._cleared_up.wait(self._grace_s):
            _signal(self._process.pid, signal.SIGKILL)
        self._cleared_up.wait()

    def _poll(self) -> int | None:
        """The exit status of the server, if it has ended. It is killed when it loses a part, unless it is ending anyway."""
        self._polls += 1
        if self._polls % _POLLS == 0:
            self._shared.scan()
        try:
            return self._process.wait(POLL_S)
        except subprocess.TimeoutExpired:
            children = set(_children(self._process.pid))
        lost = [part for part in self._parts if part not in children or process_state(part)[1]]
        if lost and not self._told_to_end.is_set():
            with contextlib.suppress(OSError):  # nobody reads it any more, where the caller is gone
                sys.stderr.write(f"ProcessLookupError: process {lost[0]} of the server ended\n")
            self._report("lost a process")
            self._shared.scan()
            _signal(self._process.pid, signal.SIGKILL)
            return self._process.wait()
        self._parts |= {child for child in children if process_state(child)[0].startswith(PART)}
        return None

    def _report(self, how: str) -> None:
        """Answer those who wait for the end. The first report stands."""
        self._how = self._how or how
        for number in self._waiting:
            self._send(rpc.reply(number, self._how))
        self._waiting.clear()


class _SharedMemoryFiles:
    """Named shared memory of the processes below this one. A process that is killed leaves its own until the machine restarts."""

    def __init__(self) -> None:
        self._since, self._paths = time.time(), set[Path]()

    def scan(self) -> None:
        """Note the files they have mapped now."""
        below = [os.getpid()]
        for pid in below:
            below += _children(pid)
        self._paths.update(_mapped(below[1:]))

    def remove(self) -> None:
        """Remove the files that are still there, are younger than the server, and are used by no other process."""
        left = {path for path in self._paths if path.exists() and path.stat().st_ctime >= self._since - 1}
        everybody = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())
        for path in left - _mapped(everybody) if left else ():
            path.unlink(missing_ok=True)


def _mapped(pids: Iterable[int]) -> set[Path]:
    found: set[Path] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()
            found |= {Path(_SHARED + line.partition(_SHARED)[2]) for line in lines if _SHARED in line}
    return found


def process_state(pid: int) -> tuple[str, bool]:
    """The title of a process, and True if it has ended or is ending: the kernel marks it before it frees the memory, which takes
    a while."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "", True
    title, _, rest = stat.partition("(")[2].rpartition(")")
    fields = rest.split()
    return title, fields[0] in "ZX" or bool(int(fields[6]) & _PF_EXITING)


def _sweep(group: int) -> None:
    """Kill what is left of the group, and every descendant that was orphaned to this process."""
    _signal(group, signal.SIGKILL)
    while children := _children(os.getpid()):
        for child in children:
            try:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
            except (ProcessLookupError, ChildProcessError):
                continue
        time.sleep(POLL_S)


def _children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task")
    found: list[int] = []
    for task in tasks.iterdir() if tasks.is_dir() else ():
        try:
            found += map(int, (task / "children").read_text().split())
        except OSError:
            continue
    return found


def _signal(group: int, number: int) -> None:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return
