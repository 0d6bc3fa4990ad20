"""How a child process of ours begins: before anything heavy is imported, and before any thread starts."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1


def settle(*, socket: int, parent: int, nice: int, cpus: Sequence[int] = ()) -> None:
    """Become a good child: deaf to Ctrl-C, dead with ``parent`` (on Linux), ``socket`` (a descriptor) its own, in its place on
    the machine. ``cpus``: the cores it may use; empty: all it has."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    os.dup2(2, 1)
    os.set_inheritable(socket, False)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if cpus:
            os.sched_setaffinity(0, cpus)
    if os.getppid() != parent:
        os._exit(0)
    os.nice(nice)
