"""The learner's end of every transport: weights are packed into a spare slot, then the transport's outlet offers them from there.

A learner has two slots like an engine. The one exported last but one, when every engine took it, is the live version: what a late
engine is given, and what the next change is a change of. So an export never overwrites what is still on offer.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch

from corrente.common.imports import load_object
from corrente.config import RunConfig
from corrente.errors import SyncError
from corrente.sync import pack
from corrente.sync.base import Exported, Offer, Order
from corrente.sync.layout import Layout

OUTLETS = {
    "inproc": "corrente.sync.shm:Shared",
    "shm": "corrente.sync.shm:Shared",
    "disk": "corrente.sync.disk:DiskOutlet",
    "http": "corrente.sync.http_server:HttpOutlet",
    "collective": "corrente.sync.collective:CollectiveOutlet",
    "vllm_nccl": "corrente.sync.vllm_nccl:VllmNcclOutlet",
    "cuda_ipc": "corrente.sync.cuda_ipc:CudaIpcOutlet",
}


class Packed(msgspec.Struct, frozen=True):
    """One whole version in the learner's slot ``slot``, in the engine's layout: uint8, (layout.nbytes,)."""

    version: int
    slot: int
    bytes: torch.Tensor


class SenderTransport(Protocol):
    """The learner's half of a transport.

    ``offer`` makes ``new`` available to ``order.members`` engines, as a change of ``base`` where that is given and the transport
    can; it may go on moving bytes out of both after it returned. ``quiet`` returns when it reads ``slot`` no more, having given
    up what is still under way. What either raises is a SyncError. ``device``: where the slots have to be, "cpu" or "cuda".
    """

    device: str

    def offer(self, order: Order, new: Packed, base: Packed | None) -> Offer: ...

    def quiet(self, slot: int) -> None: ...

    def close(self) -> None: ...


class Outbox:
    """Packs, and remembers what lies in which slot."""

    def __init__(self, *, layout: Layout, slots: Sequence[torch.Tensor], outlet: SenderTransport) -> None:
        self._layout, self._slots, self._outlet = layout, slots, outlet
        self._versions: list[int | None] = [None, None]

    def export(self, order: Order, tensors: Mapping[str, torch.Tensor]) -> Exported:
        """See Sender.export; ``tensors`` are the learner's, by state-dict name."""
        slot, start = order.slot, time.perf_counter()
        self._outlet.quiet(slot)
        self._versions[slot] = None
        pack.write(self._layout, tensors, self._slots[slot])
        copy_s = time.perf_counter() - start
        self._versions[slot] = order.version
        known = not order.whole and order.live is not None and self._versions[1 - slot] == order.live
        offer = self._outlet.offer(order, self._packed(slot), self._packed(1 - slot) if known else None)
        return Exported(offer=offer, copy_s=copy_s)

    def again(self, order: Order) -> Offer:
        """See Sender.again. The version is looked for in either slot: where it goes need not be where it lies."""
        if order.version not in self._versions:
            raise SyncError(f"version {order.version} is not kept any more; the learner has {self._versions}")
        return self._outlet.offer(order, self._packed(self._versions.index(order.version)), None)

    def close(self) -> None:
        self._outlet.close()

    def _packed(self, slot: int) -> Packed:
        version = self._versions[slot]
        assert version is not None
        return Packed(version, slot, self._slots[slot])


def build(
    config: RunConfig,
    layout: Layout,
    *,
    shared: Sequence[torch.Tensor] | None = None,
    path: str = "",
    device: str = "cuda",
) -> Outbox:
    """The outbox a config asks for. ``shared``: slots that engines see as well, and ``path``, where others can open them.
    ``device``: the learner's, for a transport whose slots are on a GPU."""
    section: Any = config.sync
    make = load_object(OUTLETS[section.__struct_config__.tag])
    if shared is not None:
        return Outbox(layout=layout, slots=shared, outlet=make(path=path))
    folder = Path(config.run.dir).absolute() / config.run.name / "weights"
    outlet: SenderTransport = make(section, layout=layout, folder=folder)
    where = device if outlet.device == "cuda" else "cpu"
    slots = [torch.zeros(layout.nbytes, dtype=torch.uint8, device=where) for _ in range(2)]
    return Outbox(layout=layout, slots=slots, outlet=outlet)
