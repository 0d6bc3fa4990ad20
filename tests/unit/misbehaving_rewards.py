"""Reward functions that misbehave in every way a process can; the tests of score/processes.py run them in one."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

CAME_BACK = "came back"


def lengths(completions: list[str]) -> list[float]:
    return [float(len(c)) for c in completions]


def last_words(prompts: list[Any], completions: list[Any], **more: Any) -> list[float]:
    """Lengths of the answers to conversations."""
    assert prompts[0][0]["role"] == "user"
    assert "environments" not in more
    return [float(len(messages[-1]["content"])) for messages in completions]


async def async_lengths(completions: list[str], *, scale: float = 1.0) -> list[float]:
    import anyio

    await anyio.sleep(0)
    return [scale * len(c) for c in completions]


def by_text(completions: list[str]) -> list[float]:
    """What a completion says is done by the process that scores it."""
    for text in completions:
        word, _, rest = text.partition(" ")
        DEEDS.get(word, len)(rest)
    return [1.0] * len(completions)


def _hang_in_c(_: str) -> None:
    re.match(r"(a+)+$", "a" * 64 + "b")  # holds the interpreter's lock for longer than anyone waits


def _fork_and_hang(folder: str) -> None:
    _fork(folder)
    time.sleep(600)


def _fork_and_leave(folder: str) -> None:
    """A fork that outlives its parent, which crashes."""
    _fork(folder)
    os._exit(7)


def _fork(folder: str) -> None:
    """A child that stays, named before anybody can end it."""
    child = os.fork()
    if not child:
        time.sleep(600)
        os._exit(0)
    Path(folder, "child").write_text(str(child))


def _raise(_: str) -> None:
    raise KeyError("gold")


DEEDS: dict[str, Any] = {
    "hang": _hang_in_c,
    "stubborn": lambda _: (signal.signal(signal.SIGTERM, signal.SIG_IGN), time.sleep(600)),
    "fork": _fork_and_hang,
    "leave": _fork_and_leave,
    "exit": lambda _: sys.exit(3),
    "_exit": lambda _: (sys.stderr.write("gone with a word\n"), os._exit(4)),
    "crash": lambda _: ctypes.string_at(0),
    "raise": _raise,
    "say": lambda rest: sys.stdout.write(rest * 100_000 + "\n"),
    "pid": lambda folder: Path(folder, "pid").write_text(str(os.getpid())),
}


def alarmed(completions: list[str]) -> list[float]:
    """As math-verify does it: SIGALRM bounds a computation that would take for ever. Only a main thread may."""

    def late(_: int, __: Any) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, 0.02)
    try:
        while True:
            pass
    except TimeoutError:
        return [0.25] * len(completions)


def forgets_its_alarm(completions: list[str]) -> list[float]:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    return [1.0] * len(completions)


def logs(completions: list[str], trainer_state: Any, log_extra: Any, log_metric: Any) -> list[float]:
    import numpy as np

    log_extra("length", np.array([len(c) for c in completions]))
    log_extra("kind", [type(c) for c in completions])
    log_metric("longest", max(len(c) for c in completions))
    return [float(trainer_state.global_step)] * len(completions)


def closure() -> Any:
    def inner(completions: list[str]) -> list[float]:
        return [0.0] * len(completions)

    return inner


class Scores:
    def method(self, completions: list[str]) -> list[float]:
        return [0.0] * len(completions)

    def __call__(self, completions: list[str]) -> list[float]:
        return [0.0] * len(completions)


nameless = lambda completions: [0.0] * len(completions)  # noqa: E731
