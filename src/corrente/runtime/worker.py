"""The program a worker process runs: ``python -m corrente.runtime.worker BIRTH``.

It settles first and imports afterwards: priority and cores belong to a thread and are inherited by those it starts, so they
must be right before numpy and torch start theirs. Then it serves (runtime/serving.py) until its socket closes. On Linux the
kernel is asked to kill it together with its parent. Ctrl-C is the controller's business.
"""

from __future__ import annotations

import sys

import msgspec

from corrente.common.child_process import set_up_child


class WorkerArgs(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's only command-line argument, as JSON: what it must know before it can be talked to."""

    name: str
    role: str
    """Dotted path of what answers its calls (serving.Role)."""
    socket: int
    parent: int
    nice: int
    cpus: tuple[int, ...]


def main() -> None:
    birth = msgspec.json.decode(sys.argv[1], type=WorkerArgs)
    set_up_child(socket=birth.socket, parent=birth.parent, nice=birth.nice, cpus=birth.cpus)
    from corrente.runtime.serving import run

    run(birth.name, role=birth.role, socket_fd=birth.socket)


if __name__ == "__main__":
    main()
