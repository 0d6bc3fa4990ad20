"""How the bytes of version v reach the engines: exported by the learner, delivered beside its next step, then flipped to.

    Sync (controller)      export(v): copy the weights     deliver(v): move them to the engines     flip(update)
    Sender (learner)       export                          offer
    Receiver (engine)                                      reserve, receive                         apply

Every engine has slots for weights, two unless it is told otherwise. It samples from one; the next version is put together in the
other. A transport decides how bytes get there; that a version is whole before anyone samples from it is the same for all.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from corrente.data.types import ApplyMode, Metrics
from corrente.sync.offers import Offer


class Update(msgspec.Struct, frozen=True, kw_only=True):
    """Weights of ``version``, delivered to where the engine can sample from them: ``slot``. ``nbytes``: bytes that were moved."""

    version: int
    slot: int
    nbytes: int = 0


class Flip(msgspec.Struct, frozen=True, kw_only=True):
    """The cost of a flip: ``pause_s`` is the longest pause of any engine, in seconds."""

    pause_s: float


class Receiver(Protocol):
    """The side of an engine that takes weights. Contract:

    - ``reserve`` returns once no live sequence samples from ``slot`` any more (mode "snapshot" leaves some there): from then on
      it may be written to. With two slots it is never the slot of the version held (SyncError). With one slot it is, and the
      engine samples nothing from then until the next ``apply``: live sequences stand still and requests wait.
    - ``receive`` fetches what is offered, checks it and has it whole in its slot when it returns. Generation goes on meanwhile.
      SyncError: nothing changed but that slot, from which nobody samples. An offer whose ``base`` is not the version held is
      refused (SyncError): a change is only applied to what it was made from.
    - ``members`` is how many engines a ``receive`` reaches: 1, but for a pool.
    - ``apply`` makes ``update.version`` the sampling weights, between two decode steps, and returns the pause in seconds. After
      it returns every newly sampled token carries the new version, but for mode "snapshot", where sequences that were live
      keep the old one. All or nothing: on SyncError the old weights are still in use or, with one slot, none.
    """

    async def reserve(self, slot: int) -> None: ...

    async def receive(self, offer: Offer) -> None: ...

    async def apply(self, update: Update, mode: ApplyMode) -> float: ...

    def members(self) -> int: ...


class VersionedReceiver(Receiver, Protocol):
    """A receiver that says which version it holds: an engine, or a pool of them. ``held`` is None before the first version."""

    async def held(self) -> int | None: ...


class OfferRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The controller's request that a learner offer ``version``, which it exported, for slot ``slot`` of ``members`` engines.

    ``live``: the version that all of them hold, None for none; unless ``whole``, the change from it is enough.
    """

    version: int
    slot: int
    live: int | None = None
    whole: bool = True
    members: int = 1


class Sender(Protocol):
    """The side of a learner that sends weights. Contract:

    - ``export`` copies the present weights, as ``version``, into the learner's ``slot`` and returns the seconds that the copy
      took. The learner may change its own as soon as it returns. A version in another slot stays on offer.
    - ``offer`` makes a version that was exported, and not overwritten since, available to engines. It reads the exported copy
      alone, so it may run beside an optimizer step, and be asked for again. Cancelled, it ends soon.
    - SyncError when either cannot be done.
    """

    async def export(self, version: int, *, slot: int) -> float: ...

    async def offer(self, request: OfferRequest) -> Offer: ...


class Sync(Protocol):
    """Contract.

    - ``export`` copies the learner's present weights, as ``version``, into memory that the transport owns. It waits for no
      transfer; when it returns the learner may change its own. At most one exported version is not live: exporting before the
      last one was flipped to gives that one up.
    - ``deliver`` brings the exported version to every engine and returns when all have it; generation goes on meanwhile, and so
      may the learner. What arrives is what was exported, however far the learner has come. On SyncError every engine is on the
      old version, and the same version may be delivered again.
    - ``flip`` makes a delivered update live in every engine, or in none: on SyncError all engines hold the old version and the
      same update may be flipped to again, or a new version exported.
    - ``catch_up`` brings the live version, whole, to an engine that comes late or missed one; that engine gets no traffic before
      it returns. Nothing is delivered, flipped or caught up at the same time: calls wait for one another, so a caller holds no
      lock that its receiver needs. An update that was delivered before and is flipped to later is not the late engine's.
    - All may be cancelled; the old version then stays in use.
    - With one slot there is no old version to stay on: from the moment its memory is reserved until a flip succeeds, an engine
      serves nothing.
    """

    async def export(self, version: int) -> None: ...

    async def deliver(self, version: int) -> Update: ...

    async def flip(self, update: Update, mode: ApplyMode) -> Flip: ...

    async def catch_up(self, receiver: Receiver) -> None: ...

    def stats(self) -> Metrics: ...


async def stage(sync: Sync, version: int) -> Update:
    """Export and deliver ``version``, for a caller whose learner has nothing to do meanwhile."""
    await sync.export(version)
    return await sync.deliver(version)
