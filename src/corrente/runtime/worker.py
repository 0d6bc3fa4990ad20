"""The program a worker process runs: ``python -m corrente.runtime.worker BIRTH``.

It settles first and imports afterwards: priority and cores belong to a thread and are inherited by those it starts, so they
must be right before numpy and torch start theirs. Then it serves (runtime/serving.py) until its socket closes. On Linux the
kernel is asked to kill it together with its parent. Ctrl-C is the controller's business.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

import msgspec

_PR_SET_PDEATHSIG = 1


class Birth(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's only command-line argument, as JSON: what it must know before it can be talked to."""

    name: str
    role: str
    """Dotted path of what answers its calls (serving.Role)."""
    socket: int
    parent: int
    nice: int
    cpus: tuple[int, ...]


def settle(birth: Birth) -> None:
    """Become a good child: deaf to Ctrl-C, dead with the parent, in its place on the machine."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    os.dup2(2, 1)
    os.set_inheritable(birth.socket, False)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        os.sched_setaffinity(0, birth.cpus)
    if os.getppid() != birth.parent:
        os._exit(0)
    os.nice(birth.nice)


def main() -> None:
    birth = msgspec.json.decode(sys.argv[1], type=Birth)
    settle(birth)
    from corrente.runtime.serving import run

    run(birth.name, role=birth.role, socket_fd=birth.socket)


if __name__ == "__main__":
    main()
