"""Ends a run in which nothing moves, saying who waits for what; work that takes long is no such run.

moves                                          how it is known
---------------------------------------------  ---------------------------------------------------------------
a stage: a group admitted, scored, trained ..  it tells the journal
a learner that computes                        Learner.progress, of the micro-batches of a step that is going on
an engine that computes                        the tokens it counts (Engine.stats)

Learner and engine are looked at, and what changed since the look before counts as of that look: a hang is found within the
patience, and what moves has that less a look at least. Who does not answer in time has not moved; who raises says so elsewhere.
"""

from __future__ import annotations

import anyio

from corrente.controller.journal import Journal
from corrente.controller.parts import Parts
from corrente.engine.base import Engine
from corrente.errors import StallError

LOOKS = 20
"""In the time that nothing may move."""


async def watch(journal: Journal, parts: Parts) -> None:
    """Raise StallError once nothing has moved for limits.watchdog_s."""
    patience_s = parts.plan.limits.watchdog_s
    look_s = patience_s / LOOKS
    tokens, pieces = await _tokens(parts.engine, look_s), parts.learner.progress()
    while (left_s := journal.moved_s + patience_s - anyio.current_time()) > 0:
        before_s = anyio.current_time()
        await anyio.sleep(min(look_s, left_s))
        now = await _tokens(parts.engine, look_s), parts.learner.progress()
        if now != (tokens, pieces):
            tokens, pieces = now
            journal.moved(before_s)
    raise StallError(f"nothing moved for limits.watchdog_s = {patience_s} s: {journal.waits.describe()}")


async def _tokens(engine: Engine, within_s: float) -> int:
    """What it has read and written so far; -1 when it does not say."""
    with anyio.move_on_after(within_s):
        try:
            stats = await engine.stats()
        except Exception:  # the reporter tells it, and whoever asks the engine for work is told more
            return -1
        return stats.prefill_tokens + stats.decode_tokens
    return -1
