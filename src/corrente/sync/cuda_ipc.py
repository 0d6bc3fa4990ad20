"""Weights between GPU processes of one host: the engine maps the learner's device memory and copies from it.

torch's own handles of CUDA IPC are used, sent as plain numbers and bytes instead of pickled. The learner's slots live on its GPU;
a publish is one packing kernel there and one device-to-device copy in the engine, over NVLink where there is one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import torch

from corrente.config import CudaIpc as Section
from corrente.errors import SyncError
from corrente.sync.base import CudaIpcOffer, Order
from corrente.sync.inbox import Delivery
from corrente.sync.layout import Layout
from corrente.sync.outbox import Packed


class Share(msgspec.Struct, frozen=True, array_like=True):
    """What UntypedStorage._share_cuda_ returns, and _new_shared_cuda takes."""

    device: int
    handle: bytes
    size_bytes: int
    offset_bytes: int
    counter_handle: bytes
    counter_offset: int
    event_handle: bytes
    event_sync_required: bool


class CudaIpcOutlet:
    """The learner's half. SyncError without a GPU."""

    device = "cuda"

    def __init__(self, section: Section, *, layout: Layout, folder: Path) -> None:
        if not torch.cuda.is_available():
            raise SyncError('sync.kind = "cuda_ipc" needs a GPU, and torch finds none')
        self._section = section

    def offer(self, order: Order, new: Packed, base: Packed | None) -> CudaIpcOffer:
        torch.cuda.synchronize(new.bytes.device)
        share = Share(*new.bytes.untyped_storage()._share_cuda_())
        return CudaIpcOffer(
            version=order.version,
            slot=order.slot,
            nbytes=new.bytes.nbytes,
            device=share.device,
            handle=msgspec.msgpack.encode(share),
            deadline_s=self._section.deadline_s,
        )

    def quiet(self, slot: int) -> None:
        return

    def close(self) -> None:
        return


class CudaIpcFetcher:
    """The engine's half."""

    on_host = False

    def fetch(self, offer: CudaIpcOffer, delivery: Delivery) -> None:
        torch.cuda.init()
        share: Any = msgspec.msgpack.decode(offer.handle, type=Share)
        storage = torch.UntypedStorage._new_shared_cuda(*msgspec.structs.astuple(share))
        source = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        if source.nbytes < delivery.layout.nbytes:
            raise SyncError(f"{source.nbytes} bytes are offered; the engine's weights are {delivery.layout.nbytes}")
        delivery.target.copy_(source[: delivery.layout.nbytes])
        torch.cuda.synchronize(storage.device)

    def close(self) -> None:
        return
