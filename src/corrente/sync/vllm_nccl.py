"""Weights for vLLM's own NCCL engine ("nccl", packed), from a learner that has no vLLM.

The learner is rank 0 of a communicator of NCCL itself: vLLM's workers build theirs from a unique id, which is made here and
travels with the offer, and both sides begin with a sum of one number. Servers meet the learner at its store, where they are given
their ranks. vLLM loads what arrives in place, so nothing can be brought there before the flip: an offer only says what will come,
and the broadcast begins when every server, paused, has said at the store that it is about to receive. What hangs in NCCL cannot
be cancelled: a server that dies there takes the others of its group with it.

Written against vLLM 0.32 (distributed/weight_transfer: nccl_common, packed_tensor) and NCCL's C interface. It needs GPUs on both
sides and was not run with any.
"""

from __future__ import annotations

import base64
import ctypes
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, TCPStore

from corrente import config as c
from corrente.errors import SyncError
from corrente.sync.base import OfferRequest
from corrente.sync.collective import meeting_place
from corrente.sync.layout import Layout
from corrente.sync.offers import VllmNcclOffer
from corrente.sync.sender import PackedVersion, SenderSetup
from corrente.sync.streams import own_stream
from corrente.sync.weight_slots import slab_views

ARRIVED, RANKS, READY = "arrived", "ranks", "ready"
"""Servers that came, the ranks they take, and, by version, how many are about to receive."""
IN_FLIGHT = 2
"""vLLM's packed_num_buffers: both sides must have the same."""
POLL_S = 0.001
UNIQUE_ID_BYTES = 128
UINT8, FLOAT32, SUM = 1, 7, 0
"""ncclUint8, ncclFloat32, ncclSum."""


class UniqueId(ctypes.Structure):
    """ncclUniqueId."""

    _fields_ = [("internal", ctypes.c_byte * UNIQUE_ID_BYTES)]


class Nccl:
    """The functions of libnccl that are needed. SyncError when it is not there, or one of them fails."""

    def __init__(self, name: str = "libnccl.so.2") -> None:
        try:
            self._library = ctypes.CDLL(name)
        except OSError as error:
            raise SyncError(
                f'sync.kind = "vllm_nccl" needs {name}, which comes with a torch for CUDA: {error}'
            ) from error
        handle, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        self._library.ncclGetErrorString.restype = ctypes.c_char_p
        self._library.ncclGetErrorString.argtypes = [number]
        self._library.ncclGetUniqueId.argtypes = [ctypes.POINTER(UniqueId)]
        self._library.ncclCommInitRank.argtypes = [ctypes.POINTER(handle), number, UniqueId, number]
        self._library.ncclBroadcast.argtypes = [handle, handle, size, number, number, handle, handle]
        self._library.ncclAllReduce.argtypes = [handle, handle, size, number, number, handle, handle]
        self._library.ncclCommAbort.argtypes = [handle]

    def unique_id(self) -> bytes:
        made = UniqueId()
        self._check("ncclGetUniqueId", ctypes.byref(made))
        return bytes(made)

    def join(self, unique_id: bytes, *, size: int) -> ctypes.c_void_p:
        """The communicator of ``size`` ranks, of which this is the first. Returns when all are there."""
        communicator = ctypes.c_void_p()
        made = UniqueId.from_buffer_copy(unique_id)
        self._check("ncclCommInitRank", ctypes.byref(communicator), size, made, 0)
        return communicator

    def broadcast(self, piece: torch.Tensor, communicator: ctypes.c_void_p, stream: Any) -> None:
        """Broadcast from this rank to all others; uint8."""
        at, count = piece.data_ptr(), piece.numel()
        self._check("ncclBroadcast", at, at, count, UINT8, 0, communicator, stream.cuda_stream)

    def greet(self, communicator: ctypes.c_void_p, stream: Any) -> None:
        """The sum of one number that every rank of vLLM's begins with."""
        one = torch.zeros(1, device="cuda")
        self._check("ncclAllReduce", one.data_ptr(), one.data_ptr(), 1, FLOAT32, SUM, communicator, stream.cuda_stream)
        stream.synchronize()

    def abort(self, communicator: ctypes.c_void_p) -> None:
        self._check("ncclCommAbort", communicator)

    def _check(self, name: str, *arguments: Any) -> None:
        result = getattr(self._library, name)(*arguments)
        if result:
            raise SyncError(f"{name}: {self._library.ncclGetErrorString(result).decode()}")


def buckets(sizes: Sequence[int], limit: int) -> Iterator[slice]:
    """Which tensors travel together, as vLLM's receiver counts: a bucket ends with the tensor that takes it past ``limit``
    bytes."""
    start, total = 0, 0
    for at, size in enumerate(sizes):
        total += size
        if total > limit:
            yield slice(start, at + 1)
            start, total = at + 1, 0
    if start < len(sizes):
        yield slice(start, len(sizes))


class VllmNcclSender:
    """The learner's half of the transport; the other half is vLLM's, and engine/vllm/nccl_engine.py asks for it."""

    device = "cuda"

    def __init__(self, section: c.VllmNccl, setup: SenderSetup) -> None:
        self._section, self._layout = section, setup.layout
        self._nccl = Nccl()
        self._store, self._port = meeting_place(section.host, deadline_s=section.deadline_s)
        self._group: _Group | None = None
        self._generation = 0
        self._offered: int | None = None
        self._pending: list[_Sending] = []
        self._lock = threading.Lock()
        """Guards what is pending: an offer adds to it, and the learner's thread takes from it."""

    def offer(
        self, request: OfferRequest, new: PackedVersion, base: PackedVersion | None, *, check: Callable[[], None]
    ) -> VllmNcclOffer:
        together = self._offered is not None and self._offered == request.live
        caught_up = request.version == request.live
        group = self._group
        if group is None or group.broken or caught_up or not together or group.members != request.members:
            self._generation += 1
            group = _Group(self._nccl, self._generation, request.members)
        self._group = None if caught_up else group
        self._offered = None if caught_up else request.version
        offer = VllmNcclOffer(
            version=request.version,
            slot=request.slot,
            nbytes=new.bytes.nbytes,
            host=self._section.host,
            port=self._port,
            members=request.members,
            generation=group.generation,
            unique_id=base64.b64encode(group.unique_id).decode(),
            bucket_bytes=self._section.bucket_mb << 20,
            deadline_s=self._section.deadline_s,
        )
        with self._lock:
            self._pending.append(_Sending(offer, new, self._layout, self._store, group))
        return offer

    def release(self, slot: int) -> None:
        """See SenderTransport. What went wrong with an earlier version, which servers could only wait for, is told here, once."""
        with self._lock:
            pending = list(self._pending)
        for sending in pending:
            if sending.slot == slot:
                sending.end()
        failures = [sending.failure for sending in pending if sending.failure]
        with self._lock:
            self._pending = [sending for sending in self._pending if sending.alive]
        if failures:
            raise SyncError(failures[0])

    def close(self) -> None:
        for sending in self._pending:
            sending.end()


class _Group:
    """A communicator, once all its members met; ``broken``: of no use any more."""

    def __init__(self, nccl: Nccl, generation: int, members: int) -> None:
        self.nccl, self.generation, self.members = nccl, generation, members
        self.unique_id = nccl.unique_id()
        self.communicator: ctypes.c_void_p | None = None
        self.broken = False

    def leave(self) -> None:
        communicator, self.communicator, self.broken = self.communicator, None, True
        if communicator is not None:
            self.nccl.abort(communicator)


class _Sending:
    """One version on its way to one group, in a thread: it meets, waits until all are ready, and sends."""

    def __init__(
        self, offer: VllmNcclOffer, new: PackedVersion, layout: Layout, store: TCPStore, group: _Group
    ) -> None:
        self.slot = new.slot
        self._offer, self._new, self._layout, self._group = offer, new, layout, group
        self._place = PrefixStore(f"generation {offer.generation}", store)
        self._until = time.monotonic() + offer.deadline_s
        self._given_up, self._turn = threading.Event(), threading.Lock()
        self.failure = ""
        """What went wrong here; empty where nothing did, or it was given up."""
        self._thread = threading.Thread(target=self._run, name="vllm-nccl", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def end(self) -> None:
        """Give it up if nothing was sent yet, else wait for its end. The slot is not read after this."""
        with self._turn:
            self._given_up.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            with own_stream(self._new.bytes):
                self._serve()
        except (SyncError, RuntimeError) as error:
            self.failure = "" if self._given_up.is_set() else f"version {self._offer.version} was not sent: {error}"
            self._group.leave()

    def _serve(self) -> None:
        if self._group.communicator is None:
            self._meet()
        self._until = float("inf")  # delivered; the controller decides when it is flipped to
        self._wait_for(f"{READY} {self._offer.version}")
        with self._turn:
            self._check()
        self._send()

    def _meet(self) -> None:
        self._wait_for(ARRIVED)
        size = 1 + self._place.add(RANKS, 0)
        self._group.communicator = self._group.nccl.join(self._group.unique_id, size=size)
        self._group.nccl.greet(self._group.communicator, torch.cuda.current_stream())

    def _wait_for(self, what: str) -> None:
        while self._place.add(what, 0) < self._offer.members:
            self._check()
            time.sleep(POLL_S)

    def _check(self) -> None:
        if self._given_up.is_set() or time.monotonic() > self._until:
            raise SyncError("given up")

    def _send(self) -> None:
        tensors = [view.reshape(-1).view(torch.uint8) for view in slab_views(self._layout, self._new.bytes).values()]
        streams = [torch.cuda.Stream() for _ in range(IN_FLIGHT)]
        in_flight: list[torch.Tensor | None] = [None] * IN_FLIGHT
        communicator = self._group.communicator
        assert communicator is not None
        for at, part in enumerate(buckets([tensor.numel() for tensor in tensors], self._offer.bucket_bytes)):
            stream = streams[at % IN_FLIGHT]
            stream.synchronize()
            with torch.cuda.stream(stream):
                in_flight[at % IN_FLIGHT] = packed = torch.cat(tensors[part])
                self._group.nccl.broadcast(packed, communicator, stream)
        for stream in streams:
            stream.synchronize()
