"""The program a worker process runs: ``python -m corrente.common.worker_main ARGS``.

It sets itself up first and imports afterwards: priority and cores belong to a thread and are inherited by those it starts, so
they must be right before numpy and torch start theirs. Then it builds the role its caller asks for, and serves it
(rpc_server.py) until its socket closes. Standard output goes to standard error.
"""

from __future__ import annotations

import socket
import sys

import msgspec

from corrente.common.child_process import set_up_child


class WorkerArgs(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's only command-line argument, as JSON: what it must know before it can be called. The role and its arguments,
    which may hold keys, come over the socket: any user of the machine can read a command line."""

    name: str
    socket: int
    parent: int
    nice: int
    cpus: tuple[int, ...]
    isolated: bool
    cleans_up: bool


def main() -> None:
    args = msgspec.json.decode(sys.argv[1], type=WorkerArgs)
    set_up_child(
        socket=args.socket,
        parent=args.parent,
        nice=args.nice,
        cpus=args.cpus,
        dies_with_parent=not args.cleans_up,
    )
    from corrente.common.rpc_server import run_worker

    run_worker(args.name, socket.socket(fileno=args.socket), isolated=args.isolated)


if __name__ == "__main__":
    main()
