"""Who is in the pool, what each holds, and the calls that run on each: the state that all parts of a pool share.

One task changes it at a time (the control plane has one thread), and rings afterwards. It decides nothing but which version is
current.
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
"""How long a replica that is taken out of rotation gets to give back what it has sampled; then that is lost."""


class PoolRequest:
    """A generation on its way. ``written`` is what replicas it had to leave sampled of it: it goes on from there.

    ``known``: what ``partial_completions`` last saw of it; where a replica dies, that much is not lost. ``moving`` tells an abort
    that takes it elsewhere from one that somebody asked for.
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
        """What was written before, and ``part``."""
        return part if self.written is None else self.written.joined_with(part)


class Member:
    """One replica: its health, its live calls, its last counters."""

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.health = Health().launched().started()
        self.calls: set[PoolRequest] = set()
        self.stats = EngineStats(version=-1)
        self.door = anyio.Lock()
        """Weights come to it one call at a time."""
        self.leaving = False
        self.lost = anyio.Event()
        self.verdict = WorkerDied(f"{replica.name} was given up")

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
    def wanted(self) -> bool:
        """Alive, and neither leaving nor given up: worth bringing weights to."""
        return self.alive and not self.leaving and not self.lost.is_set()

    def give_up(self, verdict: WorkerDied) -> None:
        """It gets nothing more, and is stopped and replaced by whoever keeps it."""
        if self.alive:
            self.health = self.health.missed()
        if not self.lost.is_set():
            self.verdict = verdict
            self.lost.set()


class Roster:
    """The members by name, and the version that is current. ``changed`` is notified after any change to it or to a call."""

    def __init__(self) -> None:
        self.changed = Condition()
        self.members: dict[str, Member] = {}
        self.calls: set[PoolRequest] = set()
        self.live: Update | None = None
        self.over: WorkerDied | None = None
        """Why there will be no replica any more."""
        self._gone = EngineStats(version=-1)

    @property
    def version(self) -> int | None:
        """What READY replicas hold; None before the first weights."""
        return None if self.live is None else self.live.version

    def ready(self) -> list[Member]:
        return [m for m in self.members.values() if m.ready]

    def stale(self) -> list[Member]:
        """Alive, and not to be asked for tokens. Those that leave, or are given up, are not among them."""
        return [m for m in self.members.values() if m.stale and m.wanted]

    def add(self, member: Member) -> None:
        self.members[member.name] = member
        self.changed.notify_all()

    def remove(self, member: Member) -> None:
        """It is dead or gone; calls that still wait for it go elsewhere."""
        member.health = member.health.died()
        self._gone = added(self._gone, member.stats)
        self.members.pop(member.name, None)
        for call in member.calls:
            call.scope.cancel()
        self.changed.notify_all()

    def end(self, why: WorkerDied) -> None:
        """There will be no replica any more; whoever waits for one is told."""
        self.over = self.over or why
        self.changed.notify_all()

    def totals(self) -> EngineStats:
        """Counters of all replicas, those that are gone included, as they were last told."""
        total = self._gone
        for member in self.members.values():
            total = added(total, member.stats)
        return total

    async def evacuate(self, member: Member) -> None:
        """Have the live calls of a replica that is out of rotation go on elsewhere; none is left when this returns.

        They take along what it has sampled, if it says so in time.
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
                pass  # it says nothing: its calls are cancelled below
            await self.changed.wait_for(lambda: not member.calls)
        for call in member.calls:
            call.scope.cancel()
        with anyio.CancelScope(shield=True):
            await self.changed.wait_for(lambda: not member.calls)


def added(a: EngineStats, b: EngineStats) -> EngineStats:
    """Sums of the counters."""
    return msgspec.structs.replace(
        a,
        prefill_tokens=a.prefill_tokens + b.prefill_tokens,
        decode_tokens=a.decode_tokens + b.decode_tokens,
        busy_s=a.busy_s + b.busy_s,
    )
