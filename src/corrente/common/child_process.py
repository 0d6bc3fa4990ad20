"""The first things a child process of ours does: before anything heavy is imported, and before any thread starts."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

STOPS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
"""Signals that ask a run to stop: Ctrl-C, a service manager or a scheduler, a terminal that is closed."""
_PR_SET_PDEATHSIG = 1
_EXEC = (
    f"import ctypes, os, signal, sys; ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG}, signal.SIGKILL); "
    "os.getppid() == int(sys.argv[1]) or os._exit(1); os.execvp(sys.argv[2], sys.argv[2:])"
)


def set_up_child(
    *, socket: int, parent: int, nice: int, cpus: Sequence[int] = (), dies_with_parent: bool = True
) -> None:
    """Configure a child process: ignore stop signals, exit when the parent exits, take its cores and its priority.

    ``socket``: the descriptor of the connection to the parent; what the child starts does not inherit it. ``cpus``: the cores it
    may use; empty: all it has. ``dies_with_parent``: the kernel kills it together with the thread that started it (Linux only).

    A terminal, a service manager and a scheduler send stop signals to every process of a run. What comes of them is for the
    parent to decide, and its way to end a child is the socket, then SIGKILL. Programs that a child starts get SIGTERM as usual.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _ignore_signal)
    signal.siginterrupt(signal.SIGTERM, False)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        signal.signal(signal.SIGHUP, _ignore_signal)
        signal.siginterrupt(signal.SIGHUP, False)
    os.register_at_fork(before=_block_sigterm, after_in_parent=_unblock_sigterm, after_in_child=_restore_sigterm)
    # The parent started us with them blocked: one that came before the handlers above were set would have ended us.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
    os.dup2(2, 1)
    os.set_inheritable(socket, False)
    if sys.platform == "linux":
        if dies_with_parent:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if cpus:
            os.sched_setaffinity(0, cpus)
    if os.getppid() != parent:  # it died before the kernel was asked
        os._exit(0)
    os.nice(nice)


def dying_with_us(command: Sequence[str]) -> list[str]:
    """The command line of a program that the kernel kills when the calling thread ends (Linux; elsewhere ``command`` itself).

    A program in between asks for it and then becomes ``command``: code between fork and exec (``preexec_fn``) is not safe in a
    process with threads.
    """
    return [sys.executable, "-I", "-c", _EXEC, str(os.getpid()), *command] if sys.platform == "linux" else [*command]


def _ignore_signal(number: int, frame: object) -> None:
    """A handler in place of SIG_IGN, which programs that this process starts would inherit."""


def _block_sigterm() -> None:
    """A fork begins with its parent's handler: a signal that comes before it has its own must wait."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _unblock_sigterm() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def _restore_sigterm() -> None:
    if signal.getsignal(signal.SIGTERM) is _ignore_signal:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _unblock_sigterm()
