"""The table of transports: one entry per ``sync.kind``, which says all that other code has to know of it. No torch.

A transport is a file with a sender (the learner's half) and a receiver (the engine's half). Both are named here by dotted path,
so that they are imported where they run. Checks, runtimes, both halves and the pool read this table; none of them names a kind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from corrente import config as c
from corrente.config import schema
from corrente.sync import offers as o


def _no_gpus(section: Any) -> str:
    return ""


def _nccl(section: c.Collective) -> str:
    return 'sync.backend = "nccl"' if section.backend == "nccl" else ""


def _same_place(section: Any, attached: bool) -> Any:
    return section


def _own_folder(section: c.Disk, attached: bool) -> c.Disk:
    return msgspec.structs.replace(section, path="")


def _own_port(section: c.Http, attached: bool) -> c.Http:
    # An attached server may reach this host by that port alone.
    return section if attached else msgspec.structs.replace(section, port=0)


class Transport(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of transport.

    ``section``: its table in the config. ``offer``: the type of its offers. ``sender``, ``receiver``: dotted paths of a
    SenderTransport and a ReceiverTransport; an empty receiver means that the engine's own code receives.

    ``runtimes``, ``engines``: the kinds it goes with; no engines: any. ``packages``: must be installed, by ``extra``.
    ``gpus``: the setting that moves weights between GPUs, empty where they go through host memory. ``gpu_each``: then the learner
    and every embedded engine need a GPU of their own.

    ``shares_memory``: the learner writes into the engines' own slots. ``broadcasts``: one transfer reaches all engines at once
    and is not repeated for one of them. ``sends_changes``: it can ship what changed since the version that the engines hold.
    ``ships_adapters``: it can ship adapters alone. ``serves_teacher``: a self-teacher may follow the run by it, which needs each
    version once more, whole, at no cost for the engines.

    ``beside_run``: the section for an evaluation that runs beside a run of that section, so that both do not write to one folder
    or listen on one port; called with the section, and whether the engines are servers that run already.
    """

    section: type[Any]
    offer: type[Any]
    sender: str
    receiver: str = ""
    runtimes: tuple[str, ...] = ("procs",)
    engines: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    extra: str = ""
    gpus: Callable[[Any], str] = _no_gpus
    gpu_each: bool = False
    shares_memory: bool = False
    broadcasts: bool = False
    sends_changes: bool = False
    ships_adapters: bool = True
    serves_teacher: bool = False
    beside_run: Callable[[Any, bool], Any] = _same_place

    @property
    def kind(self) -> str:
        return schema.kind_of(self.section)


_INPROC = Transport(
    section=c.Inproc,
    offer=o.SharedOffer,
    sender="corrente.sync.shm:SharedSender",
    receiver="corrente.sync.shm:SharedReceiver",
    runtimes=("inline",),
    shares_memory=True,
    serves_teacher=True,
)
_SHM = Transport(
    section=c.Shm,
    offer=o.SharedOffer,
    sender="corrente.sync.shm:SharedSender",
    receiver="corrente.sync.shm:SharedReceiver",
    shares_memory=True,
    serves_teacher=True,
)
_DISK = Transport(
    section=c.Disk,
    offer=o.DiskOffer,
    sender="corrente.sync.disk:DiskSender",
    receiver="corrente.sync.disk:DiskReceiver",
    beside_run=_own_folder,
    sends_changes=True,
    serves_teacher=True,
)
_HTTP = Transport(
    section=c.Http,
    offer=o.HttpOffer,
    sender="corrente.sync.http_server:HttpSender",
    receiver="corrente.sync.http:HttpReceiver",
    beside_run=_own_port,
    packages=("httpx2", "starlette", "uvicorn"),
    extra="http",
    sends_changes=True,
    serves_teacher=True,
)
_COLLECTIVE = Transport(
    section=c.Collective,
    offer=o.CollectiveOffer,
    sender="corrente.sync.collective:CollectiveSender",
    receiver="corrente.sync.collective:CollectiveReceiver",
    gpus=_nccl,
    gpu_each=True,
    broadcasts=True,
)
_VLLM_NCCL = Transport(
    section=c.VllmNccl,
    offer=o.VllmNcclOffer,
    sender="corrente.sync.vllm_nccl:VllmNcclSender",
    engines=("vllm",),
    gpus=lambda section: 'sync.kind = "vllm_nccl"',
    broadcasts=True,
    ships_adapters=False,
)
_CUDA_IPC = Transport(
    section=c.CudaIpc,
    offer=o.CudaIpcOffer,
    sender="corrente.sync.cuda_ipc:CudaIpcSender",
    receiver="corrente.sync.cuda_ipc:CudaIpcReceiver",
    gpus=lambda section: 'sync.kind = "cuda_ipc"',
)

KINDS: Mapping[str, Transport] = {
    transport.kind: transport for transport in (_INPROC, _SHM, _DISK, _HTTP, _COLLECTIVE, _VLLM_NCCL, _CUDA_IPC)
}
"""Every transport, by sync.kind."""
_BY_OFFER: Mapping[type[Any], Transport] = {transport.offer: transport for transport in KINDS.values()}


def transport_of(section: Any) -> Transport:
    """The transport that a section of the config asks for."""
    return KINDS[schema.kind_of(section)]


def transport_of_offer(offer: o.Offer) -> Transport:
    """The transport by which ``offer`` is fetched. Kinds that share a type of offers fetch alike."""
    return _BY_OFFER[type(offer)]


def address_of(section: Any) -> str | None:
    """The address at which engines find the learner; None for a transport without one."""
    return getattr(section, "host", None)
