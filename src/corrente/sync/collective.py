"""Weights by a torch.distributed broadcast: packed buckets, two in flight, gloo between CPUs and NCCL between GPUs.

No global state of torch.distributed is touched: learner and engines meet at a store that the learner keeps, count themselves, and
form a process group of their own, which stays for as long as the same ones take part and nothing fails. A ``generation`` is one
such group. Whoever dies, or does not come in time, costs that publish a SyncError on every side, and the next one forms another
generation. Broadcasts go through buckets of the group's own, never straight out of or into weights: what hangs in a group that
was given up can harm nobody. The learner's side of a broadcast is a thread beside its next step: over NCCL it has a stream and a
communicator of its own, so that it neither waits for the step's kernels nor comes between the collectives of a step. Nothing that
crosses is unpickled. The store and gloo have no password: keep them on loopback or on
a network that you trust.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch._C import _distributed_c10d
from torch._C._distributed_c10d import PrefixStore, TCPStore

from corrente import config as c
from corrente.errors import SyncError
from corrente.sync import digest
from corrente.sync.base import OfferRequest
from corrente.sync.offers import CollectiveOffer
from corrente.sync.receiver import ReceiveTarget
from corrente.sync.sender import PackedVersion, SenderSetup
from corrente.sync.streams import own_stream

c10d: Any = _distributed_c10d

IN_FLIGHT = 2
POLL_S = 0.0005
FINISH_S = 0.2
"""A root may learn that the last bucket landed a little later than those it landed at."""
STOP_S = 2.0
SILENCE_S = 30.0
"""Of members that have come, to connect, and for one bucket to land: how long one that hangs is waited for."""
ARRIVED = "arrived"

Remaining = Callable[[], float]
"""Seconds left; SyncError when there are none, or when nobody waits any more."""


def meeting_place(host: str, *, deadline_s: float) -> tuple[TCPStore, int]:
    """A store of the learner's at a free port of ``host``, and that port. SyncError when it cannot listen there."""
    try:
        listener = socket.create_server((host, 0), backlog=128)
    except OSError as error:
        raise SyncError(f"sync.host = {host!r}: the learner cannot listen there: {error.strerror}") from error
    port: int = listener.getsockname()[1]
    timeout = timedelta(seconds=deadline_s)
    listening = listener.detach()
    return TCPStore(host, port, None, True, timeout, wait_for_workers=False, master_listen_fd=listening), port


class CollectiveSender:
    """The learner's half: rank 0. The broadcast runs in a thread, for the offer must reach the engines first."""

    def __init__(self, section: c.Collective, setup: SenderSetup) -> None:
        self._section, self._layout = section, setup.layout
        self.device = "cuda" if section.backend == "nccl" else "cpu"
        self._generation, self._members = 0, 0
        self._in = _Membership()
        self._lock = threading.Lock()
        """Guards the broadcast under way: an offer replaces it, and the learner's thread ends it when it needs the slot."""
        self._sending: _Broadcast | None = None
        self._offered: int | None = None
        self._store, self._port = meeting_place(section.host, deadline_s=section.deadline_s)

    def offer(
        self, request: OfferRequest, new: PackedVersion, base: PackedVersion | None, *, check: Callable[[], None]
    ) -> CollectiveOffer:
        summed = self.device == "cpu"
        checksum = digest.of(self._layout, new.bytes, threads=1, check=check) if summed else ""
        with self._lock:
            self._end_broadcast()
            self._choose_group(request)
            offer = CollectiveOffer(
                version=request.version,
                slot=request.slot,
                nbytes=new.bytes.nbytes,
                host=self._section.host,
                port=self._port,
                members=request.members,
                generation=self._generation,
                bucket_bytes=self._section.bucket_mb << 20,
                backend=self._section.backend,
                digest=checksum,
                deadline_s=self._section.deadline_s,
            )
            self._sending = _Broadcast(offer, new, self._store, self._in)
            self._sending.start()
        return offer

    def _choose_group(self, request: OfferRequest) -> None:
        """Keep the group where the same engines take part that took the version before; else begin another generation."""
        together = self._offered is not None and self._offered == request.live and self._members == request.members
        caught_up = request.version == request.live
        if self._in.group is None or caught_up or not together:
            self._in.leave(self._in.group)
            self._in.group, self._members = None, request.members
            self._generation += 1
        self._offered = None if caught_up else request.version

    def release(self, slot: int) -> None:
        with self._lock:
            if self._sending is not None and self._sending.slot == slot:
                self._end_broadcast()

    def close(self) -> None:
        with self._lock:
            self._end_broadcast()
        self._in.close()

    def _end_broadcast(self) -> None:
        """Have nothing under way, and the group that is left, if one is. What every engine has is about to end by itself."""
        if self._sending is not None:
            self._sending.end()
            self._sending = None


class _Broadcast:
    """One broadcast, in a thread of its own. What fails here fails in the engines too, which say why; the group is gone then."""

    def __init__(self, offer: CollectiveOffer, new: PackedVersion, store: TCPStore, member: _Membership) -> None:
        self.slot = new.slot
        self._offer, self._whole, self._store, self._in = offer, new.bytes, store, member
        self._until = time.monotonic() + offer.deadline_s
        self._given_up, self._met = threading.Event(), threading.Event()
        self._turn = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="broadcast", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        """Give it up if it is not over. Nobody reads the weights any more when this returns, though those who meet may still
        wait for one another. Where all was sent there is a group to go on with."""
        self._thread.join(FINISH_S)
        with self._turn:
            self._given_up.set()
        if self._met.is_set():
            self._thread.join()

    def _run(self) -> None:
        group, self._in.group = self._in.group, None
        try:
            if group is None:
                group = _meet(self._store, self._offer, self._remaining_s, leader=True, whole=self._whole)
            with self._turn:
                self._remaining_s()
                self._met.set()
            with own_stream(self._whole):
                group.broadcast(self._whole, self._remaining_s)
        except (SyncError, RuntimeError):
            self._in.leave(group)
            return
        with self._turn:
            kept = not self._given_up.is_set()
            self._in.group = group if kept else None
        if not kept:
            self._in.leave(group)

    def _remaining_s(self) -> float:
        remaining_s = self._until - time.monotonic()
        if self._given_up.is_set() or remaining_s <= 0:
            raise SyncError("given up")
        return remaining_s


class CollectiveReceiver:
    """The engine's half: any rank but 0."""

    on_host = False

    def __init__(self) -> None:
        self._in = _Membership()
        self._of: tuple[str, int, int] | None = None

    def fetch(self, offer: CollectiveOffer, into: ReceiveTarget) -> None:
        of = (offer.host, offer.port, offer.generation)
        if self._of != of:
            self._in.leave(self._in.group)
            self._in.group = None
        group, self._in.group, self._of = self._in.group, None, None
        try:
            if group is None:
                timeout = timedelta(seconds=into.remaining_s())
                store = TCPStore(offer.host, offer.port, None, False, timeout, wait_for_workers=False)
                group = _meet(store, offer, into.remaining_s, leader=False, whole=into.target)
            with own_stream(into.target):
                group.broadcast(into.target, into.remaining_s)
        except (SyncError, RuntimeError):
            self._in.leave(group)
            raise
        self._in.group, self._of = group, of
        if offer.digest and digest.of(into.layout, into.target.cpu()) != offer.digest:
            raise SyncError(f"version {offer.version} is not what the learner sent: the checksum is another")

    def close(self) -> None:
        self._in.close()
        self._of = None


class _Group:
    """A process group, and the buckets its broadcasts go through."""

    def __init__(self, group: Any, offer: CollectiveOffer, *, leader: bool, device: torch.device) -> None:
        self._group: Any = group
        self._leader = leader
        size = min(offer.bucket_bytes, offer.nbytes)
        self._buckets = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(IN_FLIGHT)]

    def broadcast(self, whole: torch.Tensor, remaining_s: Remaining) -> None:
        """Broadcast from the leader's ``whole`` to those of all others. RuntimeError when the group breaks."""
        flying: deque[tuple[Any, torch.Tensor, torch.Tensor]] = deque()
        for number, piece in enumerate(whole.split(len(self._buckets[0]))):
            if len(flying) == IN_FLIGHT:
                self._land(*flying.popleft(), remaining_s)
            bucket = self._buckets[number % IN_FLIGHT][: len(piece)]
            if self._leader:
                bucket.copy_(piece)
            options = c10d.BroadcastOptions()
            options.rootRank, options.timeout = 0, timedelta(seconds=min(remaining_s(), SILENCE_S))
            flying.append((self._group.broadcast([bucket], options), bucket, piece))
        while flying:
            self._land(*flying.popleft(), remaining_s)
        if whole.device.type == "cuda":
            torch.cuda.current_stream(whole.device).synchronize()

    def _land(self, work: Any, bucket: torch.Tensor, piece: torch.Tensor, remaining_s: Remaining) -> None:
        """Wait for one bucket, and stop waiting when nobody does any more."""
        while not work.is_completed():
            remaining_s()
            time.sleep(POLL_S)
        work.wait()
        if not self._leader:
            piece.copy_(bucket)

    def leave(self) -> threading.Thread:
        """Let go of it. Its end waits for what hangs in it, at most SILENCE_S, and is left to the thread returned."""
        held, self._group = [self._group], None
        thread = threading.Thread(target=_drop, args=(held,), name="leave", daemon=True)
        thread.start()
        return thread


def _drop(held: list[Any]) -> None:
    held.pop().abort()


class _Membership:
    """The group one side is in, and those that it is leaving."""

    def __init__(self) -> None:
        self.group: _Group | None = None
        self._leaving: list[threading.Thread] = []

    def leave(self, group: _Group | None) -> None:
        self._leaving = [thread for thread in self._leaving if thread.is_alive()]
        if group is not None:
            self._leaving.append(group.leave())

    def close(self) -> None:
        """Leave for good; who hangs longer than STOP_S is not waited for."""
        self.leave(self.group)
        self.group = None
        until = time.monotonic() + STOP_S
        for thread in self._leaving:
            thread.join(max(0.0, until - time.monotonic()))


def _meet(
    store: TCPStore, offer: CollectiveOffer, remaining_s: Remaining, *, leader: bool, whole: torch.Tensor
) -> _Group:
    """The group of this generation, once all its members are there; over NCCL, on the GPU that ``whole``, the weights, is on."""
    place = PrefixStore(f"generation {offer.generation}", store)
    rank = 0 if leader else place.add(ARRIVED, 1)
    if rank > offer.members:
        raise SyncError(f"{rank} engines came to a broadcast to {offer.members}")
    while place.add(ARRIVED, 0) < offer.members:
        remaining_s()
        time.sleep(0.01)
    size, timeout = offer.members + 1, timedelta(seconds=min(remaining_s(), SILENCE_S))
    if offer.backend == "nccl":
        options = c10d.ProcessGroupNCCL.Options()
        options._timeout = timeout
        joined = c10d.ProcessGroupNCCL(place, rank, size, options)
        return _Group(joined, offer, leader=leader, device=whole.device)
    options = c10d.ProcessGroupGloo._Options()
    options._timeout = timeout
    options._devices = [c10d.ProcessGroupGloo.create_device(hostname=offer.host)]
    joined = c10d.ProcessGroupGloo(place, rank, size, options)
    return _Group(joined, offer, leader=leader, device=torch.device("cpu"))
