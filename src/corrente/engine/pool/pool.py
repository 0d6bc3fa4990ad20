"""A pool puts several replicas behind one Engine and one Receiver.

A request goes to the replica that ``routing`` names, among those that hold the current weights; while there is none, it waits,
and its own deadline is the bound. A replica that dies, leaves or misses an update loses its requests to the others: those of
one that is alive take along what they have and go on from there (``Request.resumed_after``); of one that is dead only what
``partial_completions`` last saw is left, and the rest is sampled again. Either way every token is labelled with the version that
sampled it.

Draws depend on a request's seed and the position, not on the replica (engines that draw otherwise have to mix in what tells
replicas apart), so which replica a request went to decides nothing but the time it takes.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager

import anyio
import msgspec
from anyio.abc import TaskStatus

from corrente.common.events import LogEvent, ignore_event
from corrente.data.types import ApplyMode, Completion, Request, Scores, Tokens
from corrente.engine.base import EngineStats
from corrente.engine.launcher import Launcher, Replica
from corrente.engine.pool.publication import Publication
from corrente.engine.pool.roster import Member, PoolRequest, Roster
from corrente.engine.pool.routing import Router
from corrente.engine.pool.supervisor import CatchUp, ReplicaSupervisor
from corrente.errors import GenerationError, RolloutError, WorkerDied
from corrente.sync.base import Update
from corrente.sync.offers import Offer

MOST_DEATHS = 3
"""Replicas that may die under one request before it is held to be the cause, and fails."""
ANSWER_S = 2.0
"""Bound on the wait for counters and partials of one replica."""


class EnginePool:
    """Implements Engine and Receiver. Its owner runs ``run`` as a task, and calls ``catch_up_by`` with Sync.catch_up before the
    first weights are published.

    ``restarts``: replacements of dead replicas in all. ``rows``: requests one replica serves at once. ``slack``: see routing.
    ``deadline_s``: of one replica's part in a publication.
    """

    def __init__(
        self,
        launcher: Launcher,
        *,
        restarts: int = 3,
        rows: int = 64,
        slack: int = 8,
        deadline_s: float = math.inf,
        log_event: LogEvent = ignore_event,
    ) -> None:
        self._launcher = launcher
        self.roster = Roster()
        self._router = Router(slack=slack, rows=rows)
        self._publication = Publication(self.roster, deadline_s=deadline_s, log_event=log_event)
        self._supervisor = ReplicaSupervisor(
            self.roster,
            self._publication,
            launcher=launcher,
            restarts=restarts,
            deadline_s=deadline_s,
            log_event=log_event,
        )
        self._busy_s = self._counted_s = 0.0

    # ---- life

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Run the replicas; started when all of them have. Never returns: WorkerDied once no replica is left."""
        try:
            async with anyio.create_task_group() as tasks:
                async with anyio.create_task_group() as starting:
                    for index in range(self._launcher.replicas):
                        starting.start_soon(tasks.start, self._supervisor.run_replica, index)
                task_status.started()
                await anyio.sleep_forever()
        finally:
            self.roster.end(WorkerDied("the engines were stopped"))

    def catch_up_by(self, catch_up: CatchUp) -> None:
        """Set the function that brings a late replica to the live version: Sync.catch_up."""
        self._supervisor.catch_up = catch_up

    async def serve_joined(self, joining: AbstractAsyncContextManager[Replica]) -> None:
        """Serve a replica that came by itself until it leaves or dies."""
        await self._supervisor.serve_joined(joining)

    def states(self) -> dict[str, str]:
        """The state of each replica, by name."""
        return {member.name: member.health.state.name for member in self.roster.members.values()}

    # ---- Engine

    async def generate(self, request: Request) -> Completion:
        call = PoolRequest(request)
        self.roster.calls.add(call)
        try:
            while True:
                member = await self._assigned(call)
                if member is None:
                    return _aborted_completion(call)
                done = await self._ask(member, call)
                if done is not None:
                    return done
        finally:
            self.roster.calls.discard(call)

    async def score(self, tokens: Tokens, *, top: int = 0) -> Scores:
        deaths = 0
        while True:
            member = await self._least_loaded()
            try:
                return await member.engine.score(tokens, top=top)
            except WorkerDied as death:
                member.give_up(death)
                deaths += 1
                if deaths == MOST_DEATHS:
                    raise GenerationError(f"{deaths} replicas died of this score; the last: {death}") from death

    async def abort(self, ids: Sequence[str]) -> None:
        named = set(ids)
        found = [call for call in self.roster.calls if call.request.id in named]
        for call in found:
            call.aborted = True
        self.roster.changed.notify_all()
        await self._on_members(found, lambda member, theirs: member.engine.abort(theirs))

    async def partial_completions(self, ids: Sequence[str]) -> Mapping[str, Completion]:
        named = set(ids)
        found = [call for call in self.roster.calls if call.request.id in named]

        async def read_partials(member: Member, theirs: Sequence[str]) -> None:
            calls = {call.request.id: (call, call.written) for call in found if call.member is member}
            for name, part in (await member.engine.partial_completions(theirs)).items():
                call, written = calls[name]
                if call.written is written:
                    call.known = call.whole(part)

        with anyio.move_on_after(ANSWER_S):
            await self._on_members(found, read_partials)
        return {
            call.request.id: msgspec.structs.replace(known, finish_reason="abort")
            for call in found
            if call in self.roster.calls and (known := call.known or call.written) is not None
        }

    async def stats(self) -> EngineStats:
        """Sums over the replicas; ``busy_s`` is their mean, so that it grows by at most a second a second."""
        if self.roster.over is not None:
            raise WorkerDied(str(self.roster.over))
        members = list(self.roster.members.values())

        async def read_stats(member: Member) -> None:
            with anyio.move_on_after(ANSWER_S):
                try:
                    member.stats = await member.engine.stats()
                except WorkerDied as death:
                    member.give_up(death)

        async with anyio.create_task_group() as tasks:
            for member in members:
                tasks.start_soon(read_stats, member)
        total = self.roster.totals()
        ready = self.roster.ready()
        self._busy_s += max(0.0, total.busy_s - self._counted_s) / max(len(members), 1)
        self._counted_s = total.busy_s
        unassigned = sum(call.member is None for call in self.roster.calls)
        return EngineStats(
            version=-1 if self.roster.version is None else self.roster.version,
            running=sum(m.stats.running for m in self.roster.members.values()),
            waiting=sum(m.stats.waiting for m in self.roster.members.values()) + unassigned,
            prefill_tokens=total.prefill_tokens,
            decode_tokens=total.decode_tokens,
            busy_s=self._busy_s,
            ready=len(ready),
        )

    # ---- Receiver

    async def held(self) -> int | None:
        if self.roster.over is not None:
            raise WorkerDied(str(self.roster.over))
        return self.roster.version

    def members(self) -> int:
        return self._publication.members()

    async def reserve(self, slot: int) -> None:
        await self._publication.reserve(slot)

    async def receive(self, offer: Offer) -> None:
        await self._publication.receive(offer)

    async def apply(self, update: Update, mode: ApplyMode) -> float:
        return await self._publication.apply(update, mode)

    # ---- one request

    async def _assigned(self, call: PoolRequest) -> Member | None:
        """The replica to ask, as soon as one is ready; None when the call was aborted first."""
        roster = self.roster
        await roster.changed.wait_for(lambda: call.aborted or bool(roster.ready()) or roster.over is not None)
        if call.aborted:
            return None
        ready = {member.name: member for member in roster.ready()}
        if not ready:
            assert roster.over is not None
            raise WorkerDied(str(roster.over))
        return ready[self._router.route(call.request.group, {name: len(m.calls) for name, m in ready.items()})]

    async def _ask(self, member: Member, call: PoolRequest) -> Completion | None:
        """The completion of a request on ``member``; None when it has to go on elsewhere."""
        call.member, call.moving, call.scope = member, False, anyio.CancelScope()
        member.calls.add(call)
        self._router.joined(call.request.group, member.name)
        part: Completion | None = None
        try:
            with call.scope:
                part = await member.engine.generate(call.rest())
        except WorkerDied as death:
            member.give_up(death)
            call.deaths += 1
            if call.deaths == MOST_DEATHS:
                text = f"request {call.request.id}: {MOST_DEATHS} replicas died while they served it; the last: {death}"
                raise GenerationError(text) from death
        finally:
            call.member = None
            member.calls.discard(call)
            self._router.left(call.request.group)
            self.roster.changed.notify_all()
        if part is None:
            call.written = call.known or call.written
            return None
        done = call.whole(part)
        if part.finish_reason == "abort" and call.moving and not call.aborted:
            call.written = call.known = done
            return None
        return done

    async def _least_loaded(self) -> Member:
        roster = self.roster
        await roster.changed.wait_for(lambda: bool(roster.ready()) or roster.over is not None)
        if roster.over is not None:
            raise WorkerDied(str(roster.over))
        return min(roster.ready(), key=lambda member: len(member.calls))

    async def _on_members(
        self, calls: Sequence[PoolRequest], ask: Callable[[Member, Sequence[str]], Awaitable[None]]
    ) -> None:
        """Ask every replica about those of these calls that it serves, at once. One that is dead is given up; of those that
        refuse, the first is raised once all were asked."""
        failures: list[RolloutError] = []

        async def one(member: Member) -> None:
            try:
                await ask(member, [call.request.id for call in calls if call.member is member])
            except WorkerDied as death:
                member.give_up(death)
            except RolloutError as error:
                failures.append(error)

        async with anyio.create_task_group() as tasks:
            for member in {call.member for call in calls if call.member is not None}:
                tasks.start_soon(one, member)
        if failures:
            raise failures[0]


def _aborted_completion(call: PoolRequest) -> Completion:
    """The completion of a request that was aborted while no replica served it: the tokens written before."""
    if call.written is not None:
        return msgspec.structs.replace(call.written, finish_reason="abort")
    prompt = call.request.tokens
    return Completion(tokens=prompt[:0], logprobs=prompt[:0].astype("float32"), spans=(), finish_reason="abort")
