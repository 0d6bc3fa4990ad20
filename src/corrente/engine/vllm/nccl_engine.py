"""A vLLM server that receives weights by vLLM's own NCCL engine (sync.kind = "vllm_nccl").

No code of corrente runs in its worker. There is no second slot, so the weights are transferred during the flip: requests wait
that long and continue after it. A transfer that fails leaves a part of the new version in place. Such a server stays paused and
must be restarted, so that no token is ever sampled from a mixture of two versions.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from corrente.data.types import ApplyMode
from corrente.engine.vllm.client import ServerError
from corrente.engine.vllm.engine import VllmEngine
from corrente.engine.vllm.layout import checkpoint_layout, checkpoint_shapes
from corrente.errors import GenerationError, SyncError
from corrente.sync.base import Update
from corrente.sync.layout import Layout
from corrente.sync.offers import Offer, VllmNcclOffer

JOIN = "/corrente/join"


class VllmNcclEngine(VllmEngine):
    """A VllmEngine for vLLM's NCCL engine. ``source``: the checkpoint that the server loaded; ``dtype``: that of its weights."""

    def __init__(self, *args: Any, source: Path, dtype: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._layout = checkpoint_layout(checkpoint_shapes(source), dtype=dtype)
        self._joined: tuple[str, int, int] | None = None
        self._offer: VllmNcclOffer | None = None
        self._partial_version: int | None = None

    async def open(self) -> Layout:
        """See VllmEngine.open; the layout is the checkpoint's own."""
        await self.read_served_model()
        return self._layout

    async def reserve(self, slot: int) -> None:
        """See Receiver.reserve. The server has no slots, so there is nothing to wait for."""
        if self.current_update is not None and slot == self.current_update.slot:
            raise SyncError(f"slot {slot} holds version {self.current_update.version}, which is in use")

    async def receive(self, offer: Offer) -> None:
        """See Receiver.receive. Join the learner's NCCL group where needed; the weights are transferred with the flip."""
        if not isinstance(offer, VllmNcclOffer):
            raise SyncError(f"{self.client.url} takes weights by vLLM's own NCCL engine, not by {type(offer).__name__}")
        self._check_whole()
        group = (offer.host, offer.port, offer.generation)
        self._offer = None
        if group != self._joined:
            self._joined = None
            try:
                await self.client.post(JOIN, _group_fields(offer), timeout_s=offer.deadline_s)
            except (ServerError, GenerationError) as error:
                raise SyncError(f"{self.client.url} did not meet the learner: {error}") from error
            self._joined = group
        self._offer, self.flip_s = offer, offer.deadline_s

    async def apply(self, update: Update, mode: ApplyMode) -> float:
        """See Receiver.apply."""
        self._check_whole()
        if self._offer is None or self._offer.version != update.version:
            raise SyncError(f"version {update.version} was not offered to {self.client.url}")
        try:
            pause_s = await super().apply(update, mode)
        except SyncError:
            self._partial_version = update.version
            raise
        self._offer = None
        return pause_s

    def flip_request(self, update: Update, mode: ApplyMode) -> dict[str, Any]:
        """See VllmEngine.flip_request. The server receives the tensors in the order of the layout."""
        assert self._offer is not None
        slabs = self._layout.slabs
        return super().flip_request(update, mode) | {
            "meeting": _group_fields(self._offer),
            "update": {
                "names": [slab.name for slab in slabs],
                "dtype_names": [slab.dtype for slab in slabs],
                "shapes": [list(slab.shape) for slab in slabs],
            },
        }

    def _check_whole(self) -> None:
        if self._partial_version is not None:
            raise SyncError(f"{self.client.url} holds a part of version {self._partial_version}; start it anew")


def _group_fields(offer: VllmNcclOffer) -> dict[str, Any]:
    return {
        "host": offer.host,
        "port": offer.port,
        "generation": offer.generation,
        "members": offer.members,
        "unique_id": offer.unique_id,
        "bucket_bytes": offer.bucket_bytes,
        "deadline_s": offer.deadline_s,
    }
