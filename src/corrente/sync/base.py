"""How the bytes of version v reach the engines: staged while generation goes on, then flipped.

    Sync (controller)      stage(v): reserve -> move the bytes into the spare slot        flip(v): apply
    Receiver (engine)                reserve(slot)   receive(offer)                                apply(update)

Every engine has two slots for weights. One is sampled from; the other is where the next version is brought together. What a
transport decides is how bytes get there; that a version is whole before anyone looks at it is the same for all.
"""

from __future__ import annotations

from typing import Literal, Protocol

import msgspec

from corrente.data.types import ApplyMode, Metrics


class Update(msgspec.Struct, frozen=True, kw_only=True):
    """Weights of ``version``, staged where the engine can see them: buffer ``slot`` of two."""

    version: int
    slot: int
    nbytes: int = 0


class Flip(msgspec.Struct, frozen=True, kw_only=True):
    """What a flip cost: the longest pause of any engine, in seconds."""

    pause_s: float


class _Offer(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag=str.lower):
    """Where an engine can get the bytes of ``version``, which belong in its slot ``slot``. Plain data: it crosses processes and
    hosts. ``nbytes``: what is moved. ``base``: the version these bytes change, None when they are all of it. ``deadline_s``: time
    to fetch it.
    """

    version: int
    slot: int
    nbytes: int
    base: int | None = None
    deadline_s: float = 300.0


class InPlace(_Offer, frozen=True, kw_only=True):
    """The learner wrote into the slot itself: there is nothing to fetch. ``path``: where another process of the same user can
    open the memory of both slots, empty where no other process can."""

    path: str = ""


class OnDisk(_Offer, frozen=True, kw_only=True):
    """A folder of safetensors with its commit marker."""

    path: str


class OverHttp(_Offer, frozen=True, kw_only=True):
    """Served by the learner. ``token`` is asked for, ``digest`` is that of all the bytes."""

    url: str
    token: str
    digest: str


class CollectiveOffer(_Offer, frozen=True, kw_only=True):
    """Broadcast by the learner to ``members`` engines that meet at ``host``:``port``. Who meets under an equal ``generation``
    keeps the group for the next broadcast; another number is another group. ``digest``: empty where it is not checked."""

    host: str
    port: int
    members: int
    generation: int
    bucket_bytes: int
    backend: Literal["gloo", "nccl"] = "gloo"
    digest: str = ""


class VllmNcclOffer(_Offer, frozen=True, kw_only=True):
    """For vLLM's own NCCL engine: ``members`` servers meet the learner at ``host``:``port`` and form the communicator of
    ``unique_id`` (NCCL's, base64), which serves a ``generation``. Nothing is sent before all of them flip."""

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


Offer = InPlace | OnDisk | OverHttp | CollectiveOffer | VllmNcclOffer | CudaIpcOffer


class Receiver(Protocol):
    """An engine's door for weights. Contract:

    - ``reserve`` returns once no live sequence samples from ``slot`` any more (mode "snapshot" leaves some there): from then on
      it may be written to. Never the slot of the version held.
    - ``receive`` fetches what is offered, checks it and has it whole in its slot when it returns. Generation goes on meanwhile.
      SyncError: nothing changed but that slot, which nobody reads. An offer whose ``base`` is not the version held is refused
      (SyncError): a change is only applied to what it was made from.
    - ``members`` is how many engines a ``receive`` reaches: 1, but for a pool.
    - ``apply`` makes ``update.version`` the sampling weights, between two decode steps, and returns the pause in seconds. After
      it returns every newly sampled token carries the new version, but for mode "snapshot", where sequences that were live
      keep the old one. All or nothing: on SyncError the old weights are still in use.
    """

    async def reserve(self, slot: int) -> None: ...

    async def receive(self, offer: Offer) -> None: ...

    async def apply(self, update: Update, mode: ApplyMode) -> float: ...

    def members(self) -> int: ...


class VersionedReceiver(Receiver, Protocol):
    """A receiver that says which version it holds: an engine, or a pool of them. ``held`` is None before the first version."""

    async def held(self) -> int | None: ...


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What a learner is asked to send: ``version``, for slot ``slot`` of ``members`` engines. ``live`` is the version that they
    all hold, None for none; unless ``whole``, what changed since is enough."""

    version: int
    slot: int
    live: int | None = None
    whole: bool = True
    members: int = 1


class Exported(msgspec.Struct, frozen=True, kw_only=True):
    """An offer, and the seconds that the copy of the weights out of the learner took."""

    offer: Offer
    copy_s: float


class Sender(Protocol):
    """A learner's door for weights. Contract:

    - ``export`` copies the present weights; the learner may change its own as soon as it returns, whether they were fetched
      or not. What was exported before into the other slot stays offered.
    - ``again`` offers a version that was exported, and not overwritten since, once more, whole.
    - SyncError when that cannot be done.
    """

    async def export(self, order: Order) -> Exported: ...

    async def again(self, order: Order) -> Offer: ...


class Sync(Protocol):
    """Contract.

    - ``stage`` copies the learner's present weights, labels them ``version``, brings them to every engine and returns when all
      have them; the learner may then change its own. Generation goes on meanwhile. At most one update is staged and not yet
      flipped.
    - ``flip`` makes a staged update live in every engine, or in none: on SyncError all engines hold the old version and the
      same update may be flipped again, or a new one staged.
    - ``catch_up`` brings the live version, whole, to an engine that comes late or missed one; that engine gets no traffic before
      it returns. Nothing is staged, flipped or caught up at the same time: calls wait for one another, so a caller holds no lock
      that its receiver needs. An update that is staged then and flipped later is not the late engine's: it was not given it.
    - All may be cancelled; the old version then stays in use.
    """

    async def stage(self, version: int) -> Update: ...

    async def flip(self, update: Update, mode: ApplyMode) -> Flip: ...

    async def catch_up(self, receiver: Receiver) -> None: ...

    def stats(self) -> Metrics: ...
