"""Who runs where. A runtime starts the workers a config asks for and hands back the three handles the pipeline needs.

Runtime   opens a run's workers: engine, learner, sync
Launcher  starts one engine at a time for it; there is one launcher per kind of engine (engine.kind)
Replica   a started engine, ready to be given weights
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Protocol

import msgspec

from corrente.config import RunConfig
from corrente.data.types import Scores, Tokens
from corrente.engine.base import Engine
from corrente.engine.launcher import Tell, untold
from corrente.learner.base import Learner
from corrente.sync.base import Receiver, Sync


class SelfTeacher(Receiver, Protocol):
    """The policy of some versions ago: a follower (sync/lagged.py) that scores. See Engine.score; at its own temperature."""

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
    WorkerDied, with its name and last words, in the task that entered."""

    def open(self, config: RunConfig, *, tell: Tell = untold) -> AbstractAsyncContextManager[Workers]: ...
