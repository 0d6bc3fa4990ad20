"""A runtime starts the workers a config asks for, and returns the handles that the pipeline needs.

Runtime    opens a run's workers: engine, learner, sync                                here
Launcher   starts one engine at a time for it; each kind of engine has its own         engine/launcher.py
Replica    a started engine, ready to be given weights                                 engine/launcher.py
Spawner    starts a process, whatever runs in it, on this host or another              common/spawn.py
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Protocol

import msgspec

from corrente.common.events import LogEvent, ignore_event
from corrente.config import RunConfig
from corrente.data.types import Scores, Tokens
from corrente.engine.base import Engine
from corrente.learner.base import Learner
from corrente.sync.base import Receiver, Sync


class SelfTeacher(Receiver, Protocol):
    """The policy of some versions ago, which scores: a receiver of sync/lagged.py. See Engine.score; at its own temperature."""

    async def score(self, tokens: Tokens, *, top: int = 0) -> Scores: ...


class Workers(msgspec.Struct, frozen=True, kw_only=True):
    """Handles on started workers. The engine holds no weights yet: the pipeline publishes the first version. ``teacher``: where
    the config asks for one."""

    engine: Engine
    learner: Learner
    sync: Sync
    teacher: SelfTeacher | None = None


class Runtime(Protocol):
    """Contract: entering starts the workers and returns when they are ready; leaving stops them within a bounded time and
    leaves no process, port, shared memory or temporary file. A worker that dies in between, and is not replaced, raises
    WorkerDied, with its name and its last output, in the task that entered."""

    def open(
        self, config: RunConfig, *, log_event: LogEvent = ignore_event
    ) -> AbstractAsyncContextManager[Workers]: ...
