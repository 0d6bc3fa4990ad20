"""Engine and Learner as the pipeline sees them, over calls to a worker process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from corrente.common.spawn import RpcCaller
from corrente.data.types import ApplyMode, Batch, Completion, Metrics, Request, Scores, Tokens
from corrente.engine.base import EngineStats
from corrente.runtime import wire
from corrente.sync.base import OfferRequest, Update
from corrente.sync.offers import Offer


class ProcEngine:
    """An engine in a worker process."""

    def __init__(self, worker: RpcCaller) -> None:
        self._worker = worker

    async def generate(self, request: Request) -> Completion:
        return await self._worker.call(wire.Generate(request=request), Completion)

    async def score(self, tokens: Tokens, *, top: int = 0) -> Scores:
        return await self._worker.call(wire.Score(tokens=tokens, top=top), Scores)

    async def abort(self, ids: Sequence[str]) -> None:
        await self._worker.call(wire.Abort(ids=tuple(ids)), None)

    async def partial_completions(self, ids: Sequence[str]) -> Mapping[str, Completion]:
        return await self._worker.call(wire.Partials(ids=tuple(ids)), dict[str, Completion])

    async def reserve(self, slot: int) -> None:
        await self._worker.call(wire.Reserve(slot=slot), None)

    async def receive(self, offer: Offer) -> None:
        """See Receiver.receive. Cancelled, the worker stops fetching."""
        await self._worker.call(wire.Receive(offer=offer), None)

    def members(self) -> int:
        return 1

    async def apply(self, update: Update, mode: ApplyMode) -> float:
        """See Receiver.apply. Cancelled, the engine goes back to the weights it had."""
        return await self._worker.call(wire.Apply(update=update, mode=mode), float)

    async def stats(self) -> EngineStats:
        return await self._worker.call(wire.Stats(), EngineStats)


class ProcLearner:
    """A learner in a worker process. A cancelled step is finished there all the same."""

    def __init__(self, worker: RpcCaller) -> None:
        self._worker = worker
        self._pieces = 0

    async def step(self, batch: Batch) -> Metrics:
        return await self._worker.call(wire.StepRpc(batch=batch), dict[str, float], on_progress=self._count)

    async def save(self, path: Path) -> None:
        await self._worker.call(wire.Save(path=str(path.absolute())), None)

    async def load(self, path: Path) -> None:
        await self._worker.call(wire.Load(path=str(path.absolute())), None)

    def progress(self) -> int:
        return self._pieces

    async def export(self, version: int, *, slot: int) -> float:
        return await self._worker.call(wire.Export(version=version, slot=slot), float)

    async def offer(self, request: OfferRequest) -> Offer:
        """See Sender.offer. Cancelled, the worker ends it."""
        return await self._worker.call(wire.OfferWeights(request=request), Offer)

    def _count(self) -> None:
        self._pieces += 1
