"""Signals that stop a run: two within a moment are one, the next counts, and whoever is stopped at once learns what was kept."""

from __future__ import annotations

import signal

import anyio
import pytest

from corrente.entrypoints.stop_signals import REPEAT_S, receive_stop_signals, stop_on_signals
from corrente.errors import Interrupted
from corrente.observe.fanout import Fanout
from corrente.testing import run_virtual


def stopped_after(*times_s: float, started_s: float = 0.0) -> tuple[float | None, float | None]:
    """When the run is asked to stop, and when it is stopped at once, by signals at ``times_s``."""

    async def main() -> tuple[float | None, float | None]:
        started, stop = anyio.Event(), anyio.Event()
        asked_s: list[float] = []
        send, signals = anyio.create_memory_object_stream[signal.Signals](10)
        begin_s = anyio.current_time()

        async def give() -> None:
            async with send:
                for at_s in times_s:
                    await anyio.sleep_until(begin_s + at_s)
                    await send.send(signal.SIGTERM)

        async def start() -> None:
            await anyio.sleep_until(begin_s + started_s)
            started.set()

        async def note() -> None:
            await stop.wait()
            asked_s.append(anyio.current_time() - begin_s)

        async def watch() -> float | None:
            try:
                async with signals:
                    await stop_on_signals(signals, started=started, stop=stop, sink=Fanout([]))
            except Interrupted:
                return anyio.current_time() - begin_s
            return None

        async with anyio.create_task_group() as tasks:
            for task in (give, start, note):
                tasks.start_soon(task)
            ended_s = await watch()
            tasks.cancel_scope.cancel()
        return (asked_s or [None])[0], ended_s

    return run_virtual(main)


@pytest.mark.parametrize(
    ("times_s", "asked_s", "ended_s"),
    [
        ((5.0,), 5.0, None),
        ((5.0, 5.0), 5.0, None),
        ((5.0, 5.01, 6.9), 5.0, None),
        ((5.0, 5.0, 5.0 + REPEAT_S), 5.0, 5.0 + REPEAT_S),
        ((5.0, 60.0), 5.0, 60.0),
    ],
)
def test_second_signal_counts_after_two_seconds(times_s: tuple[float, ...], asked_s: float, ended_s: float | None):
    assert stopped_after(*times_s) == (asked_s, ended_s)


def test_signal_before_everything_has_started_ends_the_run():
    assert stopped_after(1.0, started_s=2.0) == (None, 1.0)


def test_signals_inside_the_block_have_no_other_effect():
    async def main() -> list[signal.Signals]:
        with receive_stop_signals() as signals:
            got: list[signal.Signals] = []
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.raise_signal(number)
                got.append(await anext(signals))
            signal.raise_signal(signal.SIGTERM)  # read by nobody
            return got

    assert anyio.run(main) == [signal.SIGTERM, signal.SIGINT]
