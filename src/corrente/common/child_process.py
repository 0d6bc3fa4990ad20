"""How a child process of ours begins: before anything heavy is imported, and before any thread starts."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

STOPS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
"""What asks a run to stop: Ctrl-C, a service manager or a scheduler, a terminal that is closed."""
_PR_SET_PDEATHSIG = 1


def set_up_child(*, socket: int, parent: int, nice: int, cpus: Sequence[int] = ()) -> None:
    """Become a good child: deaf to the signals that ask a run to stop, dead with ``parent`` (on Linux), ``socket`` (a descriptor)
    its own, in its place on the machine. ``cpus``: the cores it may use; empty: all it has.

    A terminal, a service manager and a scheduler send them to every process of a run. What comes of it is the
    parent's to say, and its way to end a child is the socket, then SIGKILL. What a child starts itself hears SIGTERM as usual.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _unheard)
    signal.siginterrupt(signal.SIGTERM, False)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        signal.signal(signal.SIGHUP, _unheard)
        signal.siginterrupt(signal.SIGHUP, False)
    os.register_at_fork(before=_hold, after_in_parent=_let_go, after_in_child=_hear)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
    os.dup2(2, 1)
    os.set_inheritable(socket, False)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if cpus:
            os.sched_setaffinity(0, cpus)
    if os.getppid() != parent:
        os._exit(0)
    os.nice(nice)


def _unheard(number: int, frame: object) -> None:
    """In place of SIG_IGN, which programs that this process starts would inherit."""


def _hold() -> None:
    """A fork begins with the handler of its parent: what comes before it has its own must wait."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _let_go() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def _hear() -> None:
    if signal.getsignal(signal.SIGTERM) is _unheard:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _let_go()
