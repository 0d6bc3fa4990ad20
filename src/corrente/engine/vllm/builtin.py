"""A vLLM server that takes weights by its own NCCL engine (sync.kind = "vllm_nccl").

Nothing of corrente's runs in its worker. What is offered cannot be brought anywhere before the flip, which is therefore as long
as the transfer: requests wait, frozen, and go on after it. A transfer that fails leaves a part of the new version in place. Such
a server stays paused and is of no more use: nothing is ever sampled from half a version.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from corrente.data.types import ApplyMode
from corrente.engine.vllm.client import ServerError
from corrente.engine.vllm.engine import VllmEngine
from corrente.engine.vllm.layout import checkpoint_shapes, plain
from corrente.errors import GenerationError, SyncError
from corrente.sync.base import Update
from corrente.sync.layout import Layout
from corrente.sync.offers import Offer, VllmNcclOffer

JOIN = "/corrente/join"


class BuiltinEngine(VllmEngine):
    """See VllmEngine. ``source``: the checkpoint that the server loaded; ``dtype``: of its weights."""

    def __init__(self, *args: Any, source: Path, dtype: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._layout = plain(checkpoint_shapes(source), dtype=dtype)
        self._joined: tuple[str, int, int] | None = None
        self._offer: VllmNcclOffer | None = None
        self._half: int | None = None

    async def open(self) -> Layout:
        """See VllmEngine.open; the layout is the checkpoint's own."""
        await self.look()
        return self._layout

    async def reserve(self, slot: int) -> None:
        """See Receiver.reserve. The slots are the learner's alone."""
        if self._update is not None and slot == self._update.slot:
            raise SyncError(f"slot {slot} holds version {self._update.version}, which is in use")

    async def receive(self, offer: Offer) -> None:
        """Meet the learner where that is needed; the weights come with the flip."""
        if not isinstance(offer, VllmNcclOffer):
            raise SyncError(
                f"{self._client.url} takes weights by vLLM's own NCCL engine, not by {type(offer).__name__}"
            )
        self._check()
        group = (offer.host, offer.port, offer.generation)
        self._offer = None
        if group != self._joined:
            self._joined = None
            try:
                await self._client.post(JOIN, _meeting(offer), silence_s=offer.deadline_s)
            except (ServerError, GenerationError) as error:
                raise SyncError(f"{self._client.url} did not meet the learner: {error}") from error
            self._joined = group
        self._offer, self.flip_s = offer, offer.deadline_s

    async def apply(self, update: Update, mode: ApplyMode) -> float:
        """See Receiver.apply."""
        self._check()
        if self._offer is None or self._offer.version != update.version:
            raise SyncError(f"version {update.version} was not offered to {self._client.url}")
        try:
            pause_s = await super().apply(update, mode)
        except SyncError:
            self._half = update.version
            raise
        self._offer = None
        return pause_s

    def order(self, update: Update, mode: ApplyMode) -> dict[str, Any]:
        """See VllmEngine.order. The server reads what comes, tensor by tensor, in the order of the layout."""
        assert self._offer is not None
        slabs = self._layout.slabs
        return super().order(update, mode) | {
            "meeting": _meeting(self._offer),
            "update": {
                "names": [slab.name for slab in slabs],
                "dtype_names": [slab.dtype for slab in slabs],
                "shapes": [list(slab.shape) for slab in slabs],
            },
        }

    def _check(self) -> None:
        if self._half is not None:
            raise SyncError(f"{self._client.url} holds a part of version {self._half}; start it anew")


def _meeting(offer: VllmNcclOffer) -> dict[str, Any]:
    return {
        "host": offer.host,
        "port": offer.port,
        "generation": offer.generation,
        "members": offer.members,
        "unique_id": offer.unique_id,
        "bucket_bytes": offer.bucket_bytes,
        "deadline_s": offer.deadline_s,
    }
