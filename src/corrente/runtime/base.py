"""Who runs where. A runtime starts the workers a config asks for and hands back the three handles the pipeline needs.

Runtime   opens a run's workers: engine, learner, sync
Launcher  starts one engine at a time for it; there is one launcher per kind of engine (engine.kind)
Replica   a started engine, ready to be given weights
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Protocol

import msgspec

from corrente.config import RunConfig
from corrente.engine.base import Engine
from corrente.errors import WorkerDied
from corrente.learner.base import Learner
from corrente.sync.base import Receiver, Sync
from corrente.sync.layout import Layout
from corrente.types import Scores, Tokens

Tell = Callable[[str, str], None]
"""Where news about workers goes: a level ("info", "warning") and a line. See observe.base.Sink.event."""


def untold(level: str, message: str) -> None:
    """A ``Tell`` for whom nobody listens to."""


class SelfTeacher(Receiver, Protocol):
    """The policy of some versions ago: a follower (sync/following.py) that scores. See Engine.score; at its own temperature."""

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


class ReplicaEngine(Engine, Receiver, Protocol):
    """An engine with its door for weights. Calls that wait for one that died raise WorkerDied."""


class Replica(msgspec.Struct, frozen=True, kw_only=True):
    """A started engine that holds no weights yet, ready to be given some.

    ``layout`` is what it wants them to look like: all replicas of a run want the same. ``ended`` returns when it is dead, with
    its name and last words; it may be waited for in several tasks, and cancelled. ``leaving``, where there is one, returns
    when it has asked to be let go, and would still finish what it has.
    """

    name: str
    engine: ReplicaEngine
    layout: Layout
    ended: Callable[[], Awaitable[WorkerDied]]
    leaving: Callable[[], Awaitable[None]] | None = None


class Weights(Protocol):
    """What the engines of a run have in common: the layout of their weights, and the memory these lie in, if they share it.

    ``fd``: the two slots that learner and engines of this host share, for a child to inherit; None where the transport brings
    weights into slots of the engine's own. ``path``: where any process of this user may open the same memory, or empty.
    ``fit`` gives it room for ``layout``: the first call takes the pages, later ones only check that the layout is the same
    (ConfigError if not). Call it with an engine's layout before that engine maps the memory.
    """

    @property
    def fd(self) -> int | None: ...

    @property
    def path(self) -> str: ...

    def fit(self, layout: Layout) -> None: ...


class Launcher(Protocol):
    """Starts replicas of one kind of engine. Built as ``make(config, weights=Weights, logs=Path | None)``.

    ``replicas``: how many there are at the start. ``launch(index)``: entering starts replica ``index`` (again, if it was
    started before) and returns it when it can take weights; WorkerDied when it ended before that, another CorrenteError when
    it cannot be started at all. Leaving stops it within limits.stop_s, dead or stuck as it may be, and leaves nothing of it.
    """

    @property
    def replicas(self) -> int: ...

    def launch(self, index: int) -> AbstractAsyncContextManager[Replica]: ...
