"""Engine and Learner as the pipeline sees them, over calls to a worker process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from corrente.engine.base import ApplyMode, EngineStats
from corrente.runtime import wire
from corrente.runtime.child import Child
from corrente.sync.base import Update
from corrente.types import Batch, Completion, Floats, Metrics, Request, Tokens


class ProcEngine:
    """An engine in a child process."""

    def __init__(self, child: Child) -> None:
        self._child = child

    async def generate(self, request: Request) -> Completion:
        return await self._child.call(wire.Generate(request=request), Completion)

    async def score(self, tokens: Tokens) -> Floats:
        return await self._child.call(wire.Score(tokens=tokens), Floats)

    async def abort(self, ids: Sequence[str]) -> None:
        await self._child.call(wire.Abort(ids=tuple(ids)), None)

    async def apply(self, update: Update, mode: ApplyMode) -> float:
        """See Engine.apply. Cancelled, the engine goes back to the weights it had."""
        return await self._child.call(wire.Apply(update=update, mode=mode), float)

    async def stats(self) -> EngineStats:
        return await self._child.call(wire.Stats(), EngineStats)


class ProcLearner:
    """A learner in a child process. A cancelled step is finished there all the same."""

    def __init__(self, child: Child) -> None:
        self._child = child

    async def step(self, batch: Batch) -> Metrics:
        return await self._child.call(wire.Step(batch=batch), dict[str, float])

    async def save(self, path: Path) -> None:
        await self._child.call(wire.Save(path=str(path.absolute())), None)

    async def load(self, path: Path) -> None:
        await self._child.call(wire.Load(path=str(path.absolute())), None)

    async def export(self, slot: int) -> float:
        """Write the present weights into a shared buffer; seconds it took."""
        return await self._child.call(wire.Export(slot=slot), float)
