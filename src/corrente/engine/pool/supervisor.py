"""The supervisor starts replicas, watches and replaces them, brings them up to date, and releases those that leave.

Each replica has one task from its start to its end, and a second one that brings it up to date whenever it is STALE. A death is
reported at once, with the replica's name and last output; its requests go on in others.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager

import anyio
from anyio.abc import TaskStatus

from corrente.common.events import LogEvent
from corrente.data.types import ApplyMode
from corrente.engine.launcher import Launcher, Replica
from corrente.engine.pool.publication import Publication
from corrente.engine.pool.roster import Member, Roster
from corrente.errors import CorrenteError, SyncError, WorkerDied
from corrente.sync.base import Receiver, Update
from corrente.sync.offers import Offer

CatchUp = Callable[[Receiver], Awaitable[None]]

TRIES = 4
"""Attempts to bring a replica up to date before it counts as dead."""
PAUSE_S = 0.25
"""Before another attempt at what failed; doubled each time. The first replacement does not wait."""
LONGEST_PAUSE_S = 30.0
HEARTBEAT_S = 5.0
"""Between two checks that a replica still answers."""


class ReplicaSupervisor:
    """Runs the replicas of a pool. ``restarts``: replacements in all. ``deadline_s``: bound on bringing a replica up to date, and
    on any answer."""

    def __init__(
        self,
        roster: Roster,
        publication: Publication,
        *,
        launcher: Launcher,
        restarts: int,
        deadline_s: float,
        log_event: LogEvent,
    ) -> None:
        self._roster, self._publication, self._launcher = roster, publication, launcher
        self._restarts, self._restarts_left, self._deadline_s, self._log_event = (
            restarts,
            restarts,
            deadline_s,
            log_event,
        )
        self._replicas = 0
        self.catch_up: CatchUp | None = None

    async def run_replica(self, index: int, *, task_status: TaskStatus[None]) -> None:
        """Start replica ``index``, and another in its place whenever it dies, while there are restarts left.

        An error that keeps it from starting the first time is raised; later it counts as one more death.
        """
        self._replicas += 1
        started, failures = False, 0
        while True:
            try:
                async with self._launcher.launch(index) as replica:
                    if not started:
                        task_status.started()
                    started, death = True, await self.serve(replica)
                assert death is not None, "a launched replica asked to leave"
            except CorrenteError as error:
                if not started:
                    raise
                death = error if isinstance(error, WorkerDied) else WorkerDied(f"replica {index}: {error}")
                self._log_event("warning", f"a replacement did not start: {death}")
            if not self._restarts_left:
                return self._count_loss(death)
            self._restarts_left -= 1
            if failures:
                await anyio.sleep(min(PAUSE_S * 2**failures, LONGEST_PAUSE_S))
            failures += 1

    async def serve_joined(self, joining: AbstractAsyncContextManager[Replica]) -> None:
        """Serve a replica that was not launched here until it dies or leaves; it is not replaced. An error that keeps it
        from joining is left to ``joining``."""
        joined, death = False, None
        try:
            async with joining as replica:
                self._replicas += 1
                joined = True
                self._log_event("info", f"{replica.name} joined")
                death = await self.serve(replica)
        except CorrenteError as error:
            if not joined:
                return
            death = WorkerDied(str(error))
        self._count_loss(death or WorkerDied("the last engine left"))

    async def serve(self, replica: Replica) -> WorkerDied | None:
        """Keep a started replica in the pool until it is dead or given up, or has left (None)."""
        member = Member(replica)
        self._roster.add(member)
        try:
            death = await self._until_over(member)
        finally:
            self._roster.remove(member)
        if death is None:
            self._log_event("info", f"{member.name} left; what it was at goes on elsewhere")
            return None
        others = {0: "no other replica is", 1: "another replica is"}.get(
            n := len(self._roster.ready()), f"{n} others are"
        )
        spent = f"all {self._restarts} restarts of this run are spent"
        then = (
            f"it is replaced (restart {self._restarts - self._restarts_left + 1} of {self._restarts})"
            if self._restarts_left
            else spent
        )
        self._log_event("warning", f"{death}; {others} ready; {then}")
        return death

    async def _until_over(self, member: Member) -> WorkerDied | None:
        ended: list[WorkerDied | None] = []
        async with anyio.create_task_group() as tasks:

            async def first(wait: Callable[[], Awaitable[WorkerDied | None]]) -> None:
                ended.append(await wait())
                tasks.cancel_scope.cancel()

            tasks.start_soon(first, member.replica.ended)
            tasks.start_soon(first, lambda: self._given_up(member))
            if member.replica.leaving is not None:
                tasks.start_soon(first, lambda: self._release(member))
            tasks.start_soon(self._check_heartbeat, member)
            tasks.start_soon(self._keep_current, member)
        return ended[0]

    async def _given_up(self, member: Member) -> WorkerDied:
        await member.lost.wait()
        return member.reason

    async def _check_heartbeat(self, member: Member) -> None:
        """Give up a replica that runs and does not answer."""
        while True:
            await anyio.sleep(min(HEARTBEAT_S, self._deadline_s))
            with anyio.move_on_after(self._deadline_s) as limit:
                try:
                    await member.engine.stats()
                except WorkerDied as death:
                    return member.give_up(death)
            if limit.cancelled_caught:
                return member.give_up(
                    WorkerDied(f"{member.name} did not answer for {self._deadline_s:g} s, and was given up")
                )

    async def _release(self, member: Member) -> None:
        assert member.replica.leaving is not None
        await member.replica.leaving()
        member.leaving = True
        member.health = member.health.missed()
        self._roster.changed.notify_all()
        await self._roster.evacuate(member)

    async def _keep_current(self, member: Member) -> None:
        """Whenever a replica is STALE and a version is live: move its requests to others, and give it that version."""
        roster, tries = self._roster, 0
        while True:
            await roster.changed.wait_for(lambda: roster.version is not None and member in roster.stale())
            await roster.evacuate(member)
            problem = await self._try_catch_up(member)
            if member.ready:
                self._log_event("info", f"{member.name} is ready, at version {roster.version}")
                tries = 0
            elif problem:
                tries += 1
                if tries == TRIES:
                    text = f"{member.name} could not be brought up to date in {TRIES} attempts; the last: {problem}"
                    return member.give_up(WorkerDied(text))
                self._log_event("warning", f"{member.name} could not be brought up to date, trying again: {problem}")
                await anyio.sleep(PAUSE_S * 2**tries)

    async def _try_catch_up(self, member: Member) -> str:
        """Try once to bring a replica up to date. Returns the problem, if there was one."""
        assert self.catch_up is not None, "a version is live, but nobody said how to catch up"
        late = _LateReceiver(member, self._roster, self._publication)
        try:
            with anyio.fail_after(self._deadline_s):
                await self.catch_up(late)
        except WorkerDied as death:
            member.give_up(death)
            return ""
        except SyncError as error:
            return "" if late.overtaken else str(error)
        except TimeoutError:
            return f"not done within {self._deadline_s:g} s"
        if member.stale and member.usable and late.version is not None:
            member.health = member.health.holds(late.version, current=self._roster.version or 0)
        self._roster.changed.notify_all()
        return ""

    def _count_loss(self, death: WorkerDied) -> None:
        """Count one replica less for good. The death of the last one ends the run."""
        self._replicas -= 1
        if not self._replicas:
            self._roster.end(death)
            raise death


class _LateReceiver:
    """Implements Receiver for a replica that is being brought up to date. When a flip overtakes it, it gives up (SyncError)."""

    def __init__(self, member: Member, roster: Roster, publication: Publication) -> None:
        self._member, self._roster, self._publication = member, roster, publication
        self.version: int | None = None
        self.overtaken = False

    async def reserve(self, slot: int) -> None:
        async with self._member.weights_lock:
            await self._member.engine.reserve(slot)

    async def receive(self, offer: Offer) -> None:
        async with self._member.weights_lock:
            await self._member.engine.receive(offer)

    async def apply(self, update: Update, mode: ApplyMode) -> float:
        async with self._member.weights_lock:
            if update.version != self._roster.version or self._publication.flipping(self._member):
                self.overtaken = True
                raise SyncError(
                    f"version {update.version} was overtaken while {self._member.name} was brought up to it"
                )
            pause_s = await self._member.engine.apply(update, mode)
            self.version = update.version
        if self._roster.live is not None and update.slot == self._roster.live.slot:
            await self._publication.stage_late(self._member)
        return pause_s

    def members(self) -> int:
        return 1
