"""The roster lists the replicas of a pool, the version each holds and the calls that run on each: the state all its parts share.

One task changes it at a time (the control plane has one thread), and notifies the condition afterwards. It decides nothing but
which version is current.
"""

from __future__ import annotations

import anyio
import msgspec

from corrente.common.waiting import Condition
from corrente.data.types import Completion, Request
from corrente.engine.base import EngineStats
from corrente.engine.launcher import Replica, ReplicaEngine
from corrente.engine.pool.health import Health, State
from corrente.errors import RolloutError, WorkerDied
from corrente.sync.base import Update

EVACUATION_S = 2.0
"""Time that a replica which gets no more requests has to give back the tokens it has sampled; then they are lost."""


class PoolRequest:
    """A request that is being served. ``written``: the tokens that earlier replicas sampled; it goes on after them.

    ``known``: the tokens that ``partial_completions`` last saw; when its replica dies, they are not lost. ``moving`` tells an
    abort that moves it to another replica from one that the caller asked for.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self.written: Completion | None = None
        self.known: Completion | None = None
        self.member: Member | None = None
        self.scope = anyio.CancelScope()
        self.aborted = self.moving = False
        self.deaths = 0

    def rest(self) -> Request:
        """The request for what is still to be written."""
        return self.request if self.written is None else self.request.resumed_after(self.written)

    def whole(self, part: Completion) -> Completion:
        """The tokens written before, followed by ``part``."""
        return part if self.written is None else self.written.joined_with(part)


class Member:
    """One replica: its health, its live calls, its last counters."""

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.health = Health().launched().started()
        self.calls: set[PoolRequest] = set()
        self.stats = EngineStats(version=-1)
        self.weights_lock = anyio.Lock()
        """Held by each call that brings it weights: they come one at a time."""
        self.leaving = False
        self.lost = anyio.Event()
        self.reason = WorkerDied(f"{replica.name} was given up")

    @property
    def name(self) -> str:
        return self.replica.name

    @property
    def engine(self) -> ReplicaEngine:
        return self.replica.engine

    @property
    def ready(self) -> bool:
        return self.health.state is State.READY

    @property
    def stale(self) -> bool:
        return self.health.state is State.STALE

    @property
    def alive(self) -> bool:
        return self.ready or self.stale

    @property
    def usable(self) -> bool:
        """True if it is alive, and neither leaving nor given up: it still takes weights."""
        return self.alive and not self.leaving and not self.lost.is_set()

    def give_up(self, reason: WorkerDied) -> None:
        """Send it nothing more; its supervisor stops and replaces it."""
        if self.alive:
            self.health = self.health.missed()
        if not self.lost.is_set():
            self.reason = reason
            self.lost.set()


class Roster:
    """The members by name, and the current version. ``bell`` rings whenever one of these, or a call, has changed."""

    def __init__(self) -> None:
        self.changed = Condition()
        self.members: dict[str, Member] = {}
        self.calls: set[PoolRequest] = set()
        self.live: Update | None = None
        self.over: WorkerDied | None = None
        """Set once there will be no replica any more: the reason."""
        self._gone = EngineStats(version=-1)

    @property
    def version(self) -> int | None:
        """The version that READY replicas hold; None before the first weights."""
        return None if self.live is None else self.live.version

    def ready(self) -> list[Member]:
        return [m for m in self.members.values() if m.ready]

    def stale(self) -> list[Member]:
        """Replicas that are alive and get no requests, without those that leave or are given up."""
        return [m for m in self.members.values() if m.stale and m.usable]

    def add(self, member: Member) -> None:
        self.members[member.name] = member
        self.changed.notify_all()

    def remove(self, member: Member) -> None:
        """Remove a dead or departed member; calls that still wait for it go to others."""
        member.health = member.health.died()
        self._gone = added(self._gone, member.stats)
        self.members.pop(member.name, None)
        for call in member.calls:
            call.scope.cancel()
        self.changed.notify_all()

    def end(self, why: WorkerDied) -> None:
        """There will be no replica any more; calls that wait for one fail with ``why``."""
        self.over = self.over or why
        self.changed.notify_all()

    def totals(self) -> EngineStats:
        """Counters of all replicas as they last reported them, those that are gone included."""
        total = self._gone
        for member in self.members.values():
            total = added(total, member.stats)
        return total

    async def evacuate(self, member: Member) -> None:
        """Move the live calls of a replica that gets no more requests to others; none is left when this returns.

        They take along the tokens it has sampled, if it returns them in time.
        """
        for call in member.calls:
            call.moving = True
        with anyio.move_on_after(EVACUATION_S):
            try:
                if member.calls:
                    await member.engine.abort([call.request.id for call in member.calls])
            except WorkerDied as death:
                member.give_up(death)
            except RolloutError:
                pass  # it refuses: its calls are cancelled below
            await self.changed.wait_for(lambda: not member.calls)
        for call in member.calls:
            call.scope.cancel()
        with anyio.CancelScope(shield=True):
            await self.changed.wait_for(lambda: not member.calls)


def added(a: EngineStats, b: EngineStats) -> EngineStats:
    """The sums of two replicas' counters."""
    return msgspec.structs.replace(
        a,
        prefill_tokens=a.prefill_tokens + b.prefill_tokens,
        decode_tokens=a.decode_tokens + b.decode_tokens,
        busy_s=a.busy_s + b.busy_s,
    )
