"""The watchdog ends a run in which nothing moves, and says who waits for what. Work that takes long is not such a run.

moves                                          how it is known
---------------------------------------------  ---------------------------------------------------------------
a stage: a group admitted, scored, trained ..  it tells the journal
a learner that computes                        Learner.progress, of the micro-batches of a step that is going on
an engine that computes                        the tokens it counts (Engine.stats)

Learner and engine are checked CHECKS times in ``limits.watchdog_s``, and a change since the check before counts as of that
check: a hang is found within ``watchdog_s``, and work may pause for one check less than that. An engine that does not answer in
time has not moved; one that raises is reported elsewhere.

An environment that never answers costs its episode, and not the run: where nothing has moved for most of that time, episodes that
wait for their environment are ended. Mostly limits.episode_s and env.deadline_s do so before; not every run has them.
"""

from __future__ import annotations

from collections.abc import Sequence

import anyio

from corrente.controller.journal import Journal
from corrente.controller.parts import Parts
from corrente.controller.rollout import Player
from corrente.engine.base import Engine
from corrente.errors import StallError

CHECKS = 20
"""Checks within limits.watchdog_s."""
IDLE = 0.75
"""Part of limits.watchdog_s after which episodes that wait for their environment are lost, where nothing else moves."""


async def watch(journal: Journal, parts: Parts, *, players: Sequence[Player] = ()) -> None:
    """Raise StallError once nothing has moved for limits.watchdog_s. ``players`` lose what is idle before that."""
    patience_s = parts.plan.limits.watchdog_s
    check_s = patience_s / CHECKS
    tokens, pieces = await _tokens(parts.engine, check_s), parts.learner.progress()
    while (left_s := journal.moved_s + patience_s - anyio.current_time()) > 0:
        before_s = anyio.current_time()
        await anyio.sleep(min(check_s, left_s))
        now = await _tokens(parts.engine, check_s), parts.learner.progress()
        if now != (tokens, pieces):
            tokens, pieces = now
            journal.moved(before_s)
        still_s = anyio.current_time() - journal.moved_s
        if still_s >= IDLE * patience_s:
            reason = f"nothing moved for {still_s:g} s, and the environment had not answered (limits.watchdog_s = {patience_s:g})"
            for player in players:
                player.end_idle_episodes(reason)
    raise StallError(f"nothing moved for limits.watchdog_s = {patience_s} s: {journal.waits.describe()}")


async def _tokens(engine: Engine, within_s: float) -> int:
    """Tokens the engine has read and written so far; -1 when it does not answer within ``within_s``."""
    with anyio.move_on_after(within_s):
        try:
            stats = await engine.stats()
        except Exception:  # the reporter warns of it, and a request to the engine fails with the reason
            return -1
        return stats.prefill_tokens + stats.decode_tokens
    return -1
