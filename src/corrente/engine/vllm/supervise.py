"""Runs a command that must not outlive its owner: ``python supervise.py GRACE_S FOLDER COMMAND...``.

The owner holds the other end of standard input. When that closes, however the owner ended, or when the command ends by itself,
every process it left behind is ended too (SIGTERM, after GRACE_S SIGKILL). FOLDER, where they keep temporary files, is removed,
and so is the shared memory that they had no time to remove. The same when one of its processes ends whose title begins with
PART: a server of several processes is over as a whole, and at once. Says on standard output, in a line and before it clears up,
how the command ended: freeing gigabytes takes longer than its owner should wait to know. Ends with the command's exit status.

Nothing but the standard library is imported: it starts in milliseconds. On Linux it adopts orphans of the command, and the
command dies with it; elsewhere what the command started in sessions of its own is not found.
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
from collections.abc import Iterable
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LINUX = sys.platform == "linux"
_LOOK_S = 0.05
_LOOKS = 100
"""Looks between two at what is mapped, which takes some milliseconds."""
_SHARED = "/dev/shm/"
_PF_EXITING = 0x4
PART = "VLLM::"


def main() -> int:
    grace_s, folder, command = float(sys.argv[1]), sys.argv[2], sys.argv[3:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: None)  # the owner ends it; not SIG_IGN, which the command would inherit
    libc, supervisor = ctypes.CDLL(None), os.getpid()
    if _LINUX:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)

    def die_with_supervisor() -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if _LINUX:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != supervisor:  # it died before it could be asked for
                os._exit(1)

    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=sys.stderr, start_new_session=True, preexec_fn=die_with_supervisor
    )
    let_go, shared = threading.Event(), _Shared()
    threading.Thread(target=_end_with_owner, args=(process.pid, grace_s, let_go, shared), daemon=True).start()
    status = _wait(process, let_go, shared)
    _tell(f"ended with exit code {status}" if status >= 0 else f"was killed by signal {-status}")
    shared.look()
    _sweep(process.pid)
    shared.remove()
    shutil.rmtree(folder, ignore_errors=True)
    return status if status >= 0 else 128 - status


def _tell(how: str) -> None:
    """The first line is what counts; an owner that is gone does not read it."""
    with contextlib.suppress(OSError):
        os.write(1, f"{how}\n".encode())


class _Shared:
    """Named shared memory of the processes below this one. Who is killed leaves its own behind, until the machine starts anew."""

    def __init__(self) -> None:
        self._since, self._paths = time.time(), set[Path]()

    def look(self) -> None:
        """Note what they have mapped now."""
        below = [os.getpid()]
        for pid in below:
            below += _children(pid)
        self._paths.update(_mapped(below[1:]))

    def remove(self) -> None:
        """Remove what is still there of it, came after the command, and is used by no other process."""
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


def _wait(process: subprocess.Popen[bytes], let_go: threading.Event, shared: _Shared) -> int:
    """The exit status of the command, which is killed when it loses a part, unless it is ending anyway."""
    parts, looks = set[int](), 0
    while True:
        looks += 1
        if looks % _LOOKS == 0:
            shared.look()
        try:
            return process.wait(_LOOK_S)
        except subprocess.TimeoutExpired:
            now = set(_children(process.pid))
        lost = [part for part in parts if part not in now or _state(part)[1]]
        if lost and not let_go.is_set():
            sys.stderr.write(f"ProcessLookupError: process {lost[0]} of the server ended\n")
            _tell("lost a process")
            shared.look()
            _signal(process.pid, signal.SIGKILL)
            return process.wait()
        parts |= {child for child in now if _state(child)[0].startswith(PART)}


def _state(pid: int) -> tuple[str, bool]:
    """Title of a process, and whether it has ended or is ending: it is marked before its memory is freed, which takes a while."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "", True
    title, _, rest = stat.partition("(")[2].rpartition(")")
    fields = rest.split()
    return title, fields[0] in "ZX" or bool(int(fields[6]) & _PF_EXITING)


def _end_with_owner(group: int, grace_s: float, let_go: threading.Event, shared: _Shared) -> None:
    while os.read(0, 1024):
        pass
    let_go.set()
    shared.look()
    _signal(group, signal.SIGTERM)
    time.sleep(grace_s)
    _signal(group, signal.SIGKILL)


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
        time.sleep(_LOOK_S)


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


if __name__ == "__main__":
    sys.exit(main())
