"""Offers: where an engine can get the bytes of a version. Plain data that crosses processes and hosts; no torch.

There is one type per way in which bytes travel, and the receiver is chosen by it (kinds.py).
"""

from __future__ import annotations

from typing import Literal

import msgspec


class _Offer(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag=str.lower):
    """The bytes of ``version`` belong in the engine's slot ``slot``.

    ``nbytes``: how many are moved. ``base``: the version that these bytes change, None when they are the whole version.
    ``deadline_s``: the time to fetch them.
    """

    version: int
    slot: int
    nbytes: int
    base: int | None = None
    deadline_s: float = 300.0


class SharedOffer(_Offer, frozen=True, kw_only=True):
    """The learner wrote into memory that it shares with the engine: there is nothing to fetch.

    ``path``: where another process of the same user can open the memory of all slots, empty where no other process can.
    """

    path: str = ""


class DiskOffer(_Offer, frozen=True, kw_only=True):
    """A folder of safetensors with its commit marker."""

    path: str


class HttpOffer(_Offer, frozen=True, kw_only=True):
    """Bytes served by the learner at ``url`` to a client that shows ``token``. ``digest``: the checksum of the version."""

    url: str
    token: str
    digest: str


class CollectiveOffer(_Offer, frozen=True, kw_only=True):
    """A broadcast by the learner to ``members`` engines that meet it at ``host``:``port``.

    Engines that met under a ``generation`` keep their process group for the next broadcast of the same generation; another number
    means another group. ``digest``: the checksum of the version, empty where it is not checked.
    """

    host: str
    port: int
    members: int
    generation: int
    bucket_bytes: int
    backend: Literal["gloo", "nccl"] = "gloo"
    digest: str = ""


class VllmNcclOffer(_Offer, frozen=True, kw_only=True):
    """A broadcast for vLLM's own NCCL engine.

    ``members`` servers meet the learner at ``host``:``port`` and form the communicator of ``unique_id`` (NCCL's, base64), which
    serves one ``generation``. Nothing is sent before all of them flip.
    """

    host: str
    port: int
    members: int
    generation: int
    unique_id: str
    bucket_bytes: int


class CudaIpcOffer(_Offer, frozen=True, kw_only=True):
    """Device memory of another process on the same host, by its IPC handle."""

    device: int
    handle: bytes


Offer = SharedOffer | DiskOffer | HttpOffer | CollectiveOffer | VllmNcclOffer | CudaIpcOffer
