"""A child leaves it to its parent to stop; what it starts itself can be ended as usual."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import corrente

PROGRAM = """
import os, signal, socket, subprocess, sys, time
from corrente.common.child_process import set_up_child

ours, theirs = socket.socketpair()
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
set_up_child(socket=theirs.fileno(), parent=int(sys.argv[1]), nice=0)
for number in (signal.SIGINT, signal.SIGTERM):
    os.kill(os.getpid(), number)

forked = os.fork()
if not forked:
    time.sleep(60)
    os._exit(1)
os.kill(forked, signal.SIGTERM)
sleeper = subprocess.Popen(["sleep", "60"])
sleeper.terminate()
print(os.WTERMSIG(os.waitpid(forked, 0)[1]), sleeper.wait(), file=sys.stderr)
"""


def test_child_is_deaf_to_stops_and_what_it_starts_is_not() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(os.getpid())],
        capture_output=True,
        text=True,
        timeout=50,
        env={**os.environ, "PYTHONPATH": str(Path(corrente.__file__).parents[1])},
    )
    assert (done.returncode, done.stderr.split()) == (0, ["15", "-15"])
