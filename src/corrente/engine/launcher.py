"""A launcher starts the replicas of one kind of engine; a replica is a started engine that waits for weights.

Each engine kind implements ``Launcher``; a runtime chooses one and passes it the memory that holds the weights.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Protocol

import msgspec

from corrente.config import Vllm
from corrente.engine.base import Engine
from corrente.errors import WorkerDied
from corrente.sync.base import Receiver
from corrente.sync.layout import Layout


class ReplicaEngine(Engine, Receiver, Protocol):
    """An engine, and the receiver of its weights. Calls that wait for one that died raise WorkerDied."""


class Replica(msgspec.Struct, frozen=True, kw_only=True):
    """A started engine that holds no weights yet.

    ``layout`` is what it wants them to look like: all replicas of a run want the same. ``ended`` returns when it is dead, with
    its name and last output; it may be waited for in several tasks, and cancelled. ``leaving``, where there is one, returns
    when it has asked to be let go, and would still finish what it has.
    """

    name: str
    engine: ReplicaEngine
    layout: Layout
    ended: Callable[[], Awaitable[WorkerDied]]
    leaving: Callable[[], Awaitable[None]] | None = None


class SharedWeights(Protocol):
    """The layout of the weights that all engines of a run have, and the memory these lie in, if they share it.

    ``fd``: a descriptor of the two slots that learner and engines of this host share, for a child to inherit; None where the
    transport brings weights into slots of the engine's own. ``path``: a path under which any process of this user can open the
    same memory, or empty. ``fit`` makes room for ``layout``: the first call allocates the pages, later calls only check that the
    layout is the same (ConfigError if not). Call it with an engine's layout before that engine maps the memory.
    """

    @property
    def fd(self) -> int | None: ...

    @property
    def path(self) -> str: ...

    def fit(self, layout: Layout) -> None: ...


class Launcher(Protocol):
    """Starts replicas of one kind of engine. Built as ``make(config, weights=SharedWeights, spawner=Spawner, logs=Path | None,
    log_event=LogEvent)``; ``spawner`` starts its processes.

    ``replicas``: the number of replicas at the start. ``launch(index)``: entering the context starts replica ``index`` (again,
    if it was started before) and returns it when it can take weights; WorkerDied when it ended before that, another CorrenteError
    when it cannot be started at all. Leaving the context stops the replica within limits.stop_s, even if it is dead or hangs, and
    removes everything it left.
    """

    @property
    def replicas(self) -> int: ...

    def launch(self, index: int) -> AbstractAsyncContextManager[Replica]: ...


KINDS: Mapping[type, str] = {Vllm: "corrente.engine.vllm.launcher:VllmLauncher"}
"""Launchers by section of the config, as dotted paths. Workers of corrente serve the embedded engine; its launcher belongs to the
runtime that starts them."""
