"""What SIGINT, SIGTERM and SIGHUP do to a run: the first asks it to stop with a checkpoint, the second ends it at once."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterable, AsyncIterator, Iterator
from contextlib import contextmanager

import anyio

from corrente.common.child_process import STOPS
from corrente.errors import Interrupted
from corrente.observe.base import Sink

REPEAT_S = 2.0
"""Signals that follow the first within this time are the first again: ``timeout`` and service managers send one to the process,
and one to its group."""


@contextmanager
def receive_stop_signals() -> Iterator[AsyncIterator[signal.Signals]]:
    """Receive stop signals inside the block, where they do nothing else. SIGHUP stays ignored where it is, as under nohup."""
    outlives_the_terminal = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    with anyio.open_signal_receiver(*(STOPS - {signal.SIGHUP} if outlives_the_terminal else STOPS)) as signals:
        yield signals


async def stop_on_signals(
    signals: AsyncIterable[signal.Signals], *, started: anyio.Event, stop: anyio.Event, sink: Sink
) -> None:
    """Set ``stop`` at the first signal. Raises Interrupted at the next after REPEAT_S, and for one before ``started``."""
    counts_from_s = 0.0
    async for _ in signals:
        if not started.is_set():
            raise Interrupted("asked to stop before everything had started")
        if stop.is_set() and anyio.current_time() < counts_from_s:
            continue
        if stop.is_set():
            raise Interrupted("asked twice to stop")
        counts_from_s = anyio.current_time() + REPEAT_S
        sink.log_event(
            "info",
            f"stopping at the next version, with a checkpoint; once more, after {REPEAT_S:g} s, to stop at once, without",
        )
        stop.set()
