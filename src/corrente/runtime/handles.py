"""Engine and Learner as the pipeline sees them, over calls to a worker process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from corrente.data.types import ApplyMode, Batch, Completion, Metrics, Request, Scores, Tokens
from corrente.engine.base import EngineStats
from corrente.runtime import wire
from corrente.runtime.line import Caller
from corrente.sync.base import Exported, Offer, Order, Update


class ProcEngine:
    """An engine in a child process."""

    def __init__(self, child: Caller) -> None:
        self._child = child

    async def generate(self, request: Request) -> Completion:
        return await self._child.call(wire.Generate(request=request), Completion)

    async def score(self, tokens: Tokens, *, top: int = 0) -> Scores:
        return await self._child.call(wire.Score(tokens=tokens, top=top), Scores)

    async def abort(self, ids: Sequence[str]) -> None:
        await self._child.call(wire.Abort(ids=tuple(ids)), None)

    async def partial_completions(self, ids: Sequence[str]) -> Mapping[str, Completion]:
        return await self._child.call(wire.Partials(ids=tuple(ids)), dict[str, Completion])

    async def reserve(self, slot: int) -> None:
        await self._child.call(wire.Reserve(slot=slot), None)

    async def receive(self, offer: Offer) -> None:
        """See Receiver.receive. Cancelled, the worker stops fetching."""
        await self._child.call(wire.Receive(offer=offer), None)

    def members(self) -> int:
        return 1

    async def apply(self, update: Update, mode: ApplyMode) -> float:
        """See Receiver.apply. Cancelled, the engine goes back to the weights it had."""
        return await self._child.call(wire.Apply(update=update, mode=mode), float)

    async def stats(self) -> EngineStats:
        return await self._child.call(wire.Stats(), EngineStats)


class ProcLearner:
    """A learner in a child process. A cancelled step is finished there all the same."""

    def __init__(self, child: Caller) -> None:
        self._child = child

    async def step(self, batch: Batch) -> Metrics:
        return await self._child.call(wire.StepRpc(batch=batch), dict[str, float])

    async def save(self, path: Path) -> None:
        await self._child.call(wire.Save(path=str(path.absolute())), None)

    async def load(self, path: Path) -> None:
        await self._child.call(wire.Load(path=str(path.absolute())), None)

    def progress(self) -> int:
        return self._child.pieces

    async def export(self, order: Order) -> Exported:
        return await self._child.call(wire.Export(order=order), Exported)

    async def again(self, order: Order) -> Offer:
        return await self._child.call(wire.Again(order=order), Offer)
