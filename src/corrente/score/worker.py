"""The program of a scoring process: ``python -m corrente.score.worker BIRTH``.

It answers in its main thread, one question after the other, so what it runs may use signals (SIGALRM), fork, or hang in C code:
who started it kills it when it is late. It ends when its socket closes; on Linux the kernel kills it together with its parent.
What is written to its standard output goes to standard error.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from typing import Any

import msgspec

from corrente.common.child_process import set_up_child
from corrente.common.imports import load_object
from corrente.errors import CorrenteError, described
from corrente.score import messages

Respond = Callable[[Any], messages.Answer]
"""A role: built from its options, raises if it cannot be; then answers questions."""


def main() -> None:
    birth = msgspec.json.decode(sys.argv[1], type=messages.Birth)
    set_up_child(socket=birth.socket, parent=birth.parent, nice=birth.nice)
    link = socket.socket(fileno=birth.socket)
    os.register_at_fork(after_in_child=link.close)  # a fork of the user's must not keep the line open
    try:
        respond: Respond = load_object(birth.role)(**birth.options)
    except Exception as error:
        text = str(error) if isinstance(error, CorrenteError) else f"{type(error).__name__}: {error}"
        _send(link, messages.Refused(message=text))
        return
    _send(link, messages.Ready())
    while (body := _receive(link)) is not None:
        question = msgspec.msgpack.decode(body, type=messages.Question)
        try:
            answer = respond(question)
        except Exception as error:  # user code: whatever it raises is the answer
            answer = messages.Raised(error=described(error))
        _send(link, answer)


def _send(link: socket.socket, answer: messages.Answer) -> None:
    try:
        data = messages.frame(answer)
    except (TypeError, ValueError) as error:
        data = messages.frame(messages.Raised(error=f"its answer does not cross processes: {error}"))
    link.sendall(data)


def _receive(link: socket.socket) -> bytes | None:
    head = _exactly(link, messages.HEADER.size)
    return None if head is None else _exactly(link, messages.HEADER.unpack(head)[0])


def _exactly(link: socket.socket, count: int) -> bytes | None:
    """``count`` bytes; None when the line is closed."""
    data = bytearray()
    while len(data) < count:
        more = link.recv(min(count - len(data), 1 << 18))
        if not more:
            return None
        data += more
    return bytes(data)


if __name__ == "__main__":
    main()
