"""Who runs where. A runtime starts the workers a config asks for and hands back the three handles the pipeline needs."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Protocol

import msgspec

from corrente.config import RunConfig
from corrente.engine.base import Engine
from corrente.learner.base import Learner
from corrente.sync.base import Sync


class Workers(msgspec.Struct, frozen=True, kw_only=True):
    """Handles on started workers. The engine holds no weights yet: the pipeline publishes the first version."""

    engine: Engine
    learner: Learner
    sync: Sync


class Runtime(Protocol):
    """Contract: entering starts the workers and returns when they are ready; leaving stops them within a bounded time and
    leaves no process, port, shared memory or temporary file. A worker that dies in between raises WorkerDied, with its
    name and last words, in the task that entered."""

    def open(self, config: RunConfig) -> AbstractAsyncContextManager[Workers]: ...
