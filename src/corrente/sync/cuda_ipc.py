"""Weights between GPU processes of one host: the engine maps the learner's device memory and copies from it.

torch's own handles of CUDA IPC are used, sent as plain numbers and bytes instead of pickled. The learner's slots live on its GPU;
a publish is one packing kernel there and one device-to-device copy in the engine, over NVLink where there is one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import torch

from corrente.config import CudaIpc as Section
from corrente.errors import SyncError
from corrente.sync.base import OfferRequest
from corrente.sync.offers import CudaIpcOffer
from corrente.sync.receiver import ReceiveTarget
from corrente.sync.sender import PackedVersion, SenderSetup
from corrente.sync.streams import own_stream


class Share(msgspec.Struct, frozen=True, array_like=True):
    """The values that UntypedStorage._share_cuda_ returns, and _new_shared_cuda takes."""

    device: int
    handle: bytes
    size_bytes: int
    offset_bytes: int
    counter_handle: bytes
    counter_offset: int
    event_handle: bytes
    event_sync_required: bool


class CudaIpcSender:
    """The learner's half. SyncError without a GPU."""

    device = "cuda"

    def __init__(self, section: Section, setup: SenderSetup) -> None:
        if not torch.cuda.is_available():
            raise SyncError('sync.kind = "cuda_ipc" needs a GPU, and torch finds none')
        self._section = section

    def offer(
        self, request: OfferRequest, new: PackedVersion, base: PackedVersion | None, *, check: Callable[[], None]
    ) -> CudaIpcOffer:
        """Share the slot. torch records an event on the present stream, for which the engine waits: on the default one it would
        wait for the learner's next step."""
        with own_stream(new.bytes):
            share = Share(*new.bytes.untyped_storage()._share_cuda_())
        return CudaIpcOffer(
            version=request.version,
            slot=request.slot,
            nbytes=new.bytes.nbytes,
            device=share.device,
            handle=msgspec.msgpack.encode(share),
            deadline_s=self._section.deadline_s,
        )

    def release(self, slot: int) -> None:
        return

    def close(self) -> None:
        return


class CudaIpcReceiver:
    """The engine's half."""

    on_host = False

    def fetch(self, offer: CudaIpcOffer, into: ReceiveTarget) -> None:
        torch.cuda.init()
        share: Any = msgspec.msgpack.decode(offer.handle, type=Share)
        storage = torch.UntypedStorage._new_shared_cuda(*msgspec.structs.astuple(share))
        source = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        if source.nbytes < into.layout.nbytes:
            raise SyncError(f"{source.nbytes} bytes are offered; the engine's weights are {into.layout.nbytes}")
        with own_stream(into.target):
            into.target.copy_(source[: into.layout.nbytes])
            torch.cuda.current_stream().synchronize()

    def close(self) -> None:
        return
