"""Publication over a pool is a transaction: staged on all, flipped on all; who fails is left behind, and the others go on.

    reserve   decides which replicas take part: the READY ones, of which it waits for one; the first time, all that have started
    receive   on all of them at once, and on those that became READY since; one that fails drops out, and serves the old version
              until the others flip
    apply     on all of them at once; then the version is current, and every live replica that did not get it is STALE

If none succeeds the step fails (SyncError) and every replica is on the old version. A STALE replica comes back through
``Sync.catch_up`` (supervisor.py), never through a transaction others are in the middle of.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio

from corrente.common.events import LogEvent
from corrente.data.types import ApplyMode
from corrente.engine.pool.roster import Member, Roster
from corrente.errors import CorrenteError, SyncError, WorkerDied
from corrente.sync.base import Update
from corrente.sync.kinds import transport_of_offer
from corrente.sync.offers import Offer

ROLLBACK_S = 5.0


class Publication:
    """Implements Receiver over a roster. ``deadline_s``: of one replica's receive or apply; past it the replica is given up."""

    def __init__(self, roster: Roster, *, deadline_s: float, log_event: LogEvent) -> None:
        self._roster, self._deadline_s, self._log_event = roster, deadline_s, log_event
        self._participants: list[Member] = []
        self._reserved: set[Member] = set()
        self._offer: Offer | None = None
        self._flipping = False

    def flipping(self, member: Member) -> bool:
        """True if ``member`` is in the middle of a flip that is not committed yet."""
        return self._flipping and member in self._participants

    async def reserve(self, slot: int) -> None:
        """Open a transaction; the one before is over, however it went."""
        self._participants, self._reserved, self._offer = [], set(), None
        roster = self._roster
        await roster.changed.wait_for(lambda: not any(m.calls for m in roster.stale()))
        await roster.changed.wait_for(lambda: bool(self._eligible()))
        self._participants = self._eligible()
        self._reserved = set(self._participants)
        await self._ask_participants(
            lambda member: member.engine.reserve(slot), deadline_s=None, what="leave its spare slot"
        )

    def members(self) -> int:
        """The number of replicas in the open transaction, those included that became READY since it was opened."""
        self._participants += [member for member in self._roster.ready() if member not in self._participants]
        return sum(member.usable for member in self._participants)

    async def receive(self, offer: Offer) -> None:
        async def fetch(member: Member) -> None:
            if member not in self._reserved:
                await member.engine.reserve(offer.slot)
            await member.engine.receive(offer)

        self.members()
        self._offer = offer
        await self._ask_participants(fetch, deadline_s=self._deadline_s, what=f"receive version {offer.version}")

    async def stage_late(self, member: Member) -> None:
        """Stage the version that is offered at this moment on a replica that has just caught up, so that the flip does not
        leave it behind again: in a run that publishes all the time a late replica would never become READY. No flip may begin
        meanwhile.

        A broadcast is not repeated for one replica; where staging fails, it is left behind.
        """
        offer = self._offer
        if offer is None or transport_of_offer(offer).broadcasts or member in self._participants:
            return
        try:
            async with member.weights_lock:
                await member.engine.reserve(offer.slot)
                await member.engine.receive(offer)
        except CorrenteError:
            return
        if self._offer is offer and not self._flipping:
            self._participants.append(member)

    async def apply(self, update: Update, mode: ApplyMode) -> float:
        """See Receiver. When it is cancelled, replicas that flipped go back; one that cannot is left behind."""
        pauses: dict[str, float] = {}

        async def flip(member: Member) -> None:
            pauses[member.name] = await member.engine.apply(update, mode)

        if not any(member.usable for member in self._participants):
            await self._stage_again(update)
        self._flipping = True
        try:
            await self._ask_participants(flip, deadline_s=self._deadline_s, what=f"apply version {update.version}")
        except anyio.get_cancelled_exc_class():
            with anyio.move_on_after(ROLLBACK_S, shield=True):
                await self._roll_back([m for m in self._participants if m.name in pauses])
            raise
        finally:
            self._flipping = False
        self._commit(update)
        return max(pauses.values())

    async def _stage_again(self, update: Update) -> None:
        """All replicas that had the update are dead: stage it, from where it is still offered, on those that replace them.

        Not through Sync.catch_up: the publish that is under way holds the sync's lock, and would wait for itself.
        """
        offer = self._offer
        if offer is None or offer.version != update.version:
            raise SyncError(f"version {update.version} was not received by anybody")
        roster = self._roster
        await roster.changed.wait_for(lambda: bool(roster.ready() or roster.stale()) or roster.over is not None)
        self._participants = [*roster.ready(), *roster.stale()]
        await self.receive(offer)

    def _eligible(self) -> list[Member]:
        """The replicas that may take part in a transaction that begins now."""
        return self._roster.stale() if self._roster.version is None else self._roster.ready()

    def _commit(self, update: Update) -> None:
        participants, self._participants, self._offer = self._participants, [], None
        self._roster.live = update
        for member in self._roster.members.values():
            if not member.alive:
                continue
            if member in participants and member.usable:
                member.health = member.health.holds(update.version, current=update.version)
            else:
                member.health = member.health.missed()
        self._roster.changed.notify_all()

    async def _roll_back(self, flipped: list[Member]) -> None:
        """Return replicas to the version that is current."""
        live = self._roster.live
        for member in flipped:
            if member.ready:
                member.health = member.health.missed()
        for member in flipped:
            if live is None or not member.usable:
                continue
            try:
                await member.engine.apply(live, "swap")
                member.health = member.health.holds(live.version, current=live.version)
            except CorrenteError as error:
                self._log_event("warning", f"{member.name} could not go back to version {live.version}: {error}")
        self._roster.changed.notify_all()

    async def _ask_participants(
        self, ask: Callable[[Member], Awaitable[object]], *, deadline_s: float | None, what: str
    ) -> None:
        """Call ``ask`` on all participants at once; one that fails drops out. SyncError when none is left."""
        failures: dict[str, str] = {}

        async def one(member: Member) -> None:
            with anyio.move_on_after(deadline_s) as limit:
                try:
                    async with member.weights_lock:
                        await ask(member)
                except WorkerDied as death:
                    failures[member.name] = str(death)
                    member.give_up(death)
                except CorrenteError as error:
                    failures[member.name] = f"{type(error).__name__}: {error}"
            if limit.cancelled_caught:
                failures[member.name] = f"no answer within {deadline_s:g} s"
                member.give_up(WorkerDied(f"{member.name} did not {what} within {deadline_s:g} s, and was given up"))

        async with anyio.create_task_group() as tasks:
            for member in self._participants:
                if member.usable:
                    tasks.start_soon(one, member)
        left = [m for m in self._participants if m.name not in failures and m.usable]
        reasons = "; ".join(f"{name}: {reason}" for name, reason in sorted(failures.items())) or "no replica is left"
        if not left:
            raise SyncError(f"no replica could {what}: {reasons}")
        if any(member.name in failures and not member.leaving for member in self._participants):
            self._log_event("warning", f"could not {what}, and is brought up to date afterwards: {reasons}")
        self._participants = left
