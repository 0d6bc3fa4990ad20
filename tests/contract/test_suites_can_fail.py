"""A suite that nothing fails proves nothing: each clause here is broken on purpose, and the message names it."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import anyio
import msgspec
import numpy as np
import pytest

from corrente.buffer.window import WindowBuffer
from corrente.errors import SyncError
from corrente.inflight.policies import DrainPolicy, ResumePolicy, SwapPolicy
from corrente.sim.distributions import Fixed
from corrente.sim.engine import VirtualEngine
from corrente.sim.parts import (
    RecordingSink,
    VirtualAlgorithm,
    VirtualEnv,
    VirtualLearner,
    VirtualPrompts,
    VirtualScorer,
)
from corrente.sim.pool import VirtualPool
from corrente.staleness.base import StalenessVerdict
from corrente.sync.base import Flip, Update
from corrente.sync.offers import SharedOffer
from corrente.testing import (
    ContractError,
    EngineCase,
    LearnerCase,
    SyncCase,
    check_buffer,
    check_engine,
    check_env,
    check_inflight,
    check_learner,
    check_prompts,
    check_scorer,
    check_sink,
    check_staleness,
    check_sync,
    run_virtual,
    samples,
)


class FreesAtTake(WindowBuffer):
    async def take(self, count):
        groups = await super().take(count)
        self.release([g.id for g in groups])
        return groups


class LosesSlotsOfCancelled(WindowBuffer):
    async def reserve(self):
        await super().reserve()
        await anyio.lowlevel.checkpoint()
        return await super().reserve()


class CompletionOrder(WindowBuffer):
    async def take(self, count):
        return list(reversed(await super().take(count)))


class WakesNobody(WindowBuffer):
    def release(self, groups):
        self._taken.difference_update(groups)


class ReusesNumbers(WindowBuffer):
    def drop(self, ticket):
        super().drop(ticket)
        self._next = ticket


class ForgetsWhenClosed(WindowBuffer):
    async def take(self, count):
        return [] if self._closed else await super().take(count)


class TakesWhenCancelled(WindowBuffer):
    async def take(self, count):
        if self._ready < count and self._ready:
            await super().take(1)
        return await super().take(count)


@pytest.mark.parametrize(
    ("broken", "clause"),
    [
        (FreesAtTake, "training"),
        (LosesSlotsOfCancelled, "occupancy counts"),
        (CompletionOrder, "admission order"),
        (WakesNobody, "release frees the slot"),
        (ReusesNumbers, "number"),
        (ForgetsWhenClosed, "after close"),
        (TakesWhenCancelled, "cancelling take takes nothing"),
    ],
)
def test_broken_buffers_are_caught(broken, clause: str) -> None:
    with pytest.raises((ContractError, ExceptionGroup)) as caught:
        run_virtual(check_buffer, lambda: broken(slots=4, window=2), limit_s=1000)
    assert clause in repr(caught.value)


async def staged(engine, version: int) -> Update:
    """A version brought to a virtual engine."""
    slot = version % 2
    await engine.reserve(slot)
    await engine.receive(SharedOffer(version=version, slot=slot, nbytes=0))
    return Update(version=version, slot=slot)


class RelabelsAll(VirtualEngine):
    async def generate(self, request):
        done = await super().generate(request)
        spans = tuple(msgspec.structs.replace(span, start=0) for span in done.spans[-1:])
        return msgspec.structs.replace(done, spans=spans)


class IgnoresBudget(VirtualEngine):
    async def generate(self, request):
        more = msgspec.structs.replace(request.sampling, max_tokens=request.sampling.max_tokens + 1)
        return await super().generate(msgspec.structs.replace(request, sampling=more))


class DependsOnCompany(VirtualEngine):
    async def generate(self, request):
        beside = len(self._running) + len(self._waiting)
        done = await super().generate(request)
        return msgspec.structs.replace(done, tokens=done.tokens + beside)


class KeepsCancelled(VirtualEngine):
    def _forget(self, live) -> None:
        pass


class ForgetsPartials(VirtualEngine):
    async def abort(self, ids) -> None:
        self.restart()


class ForgetsWhatWasWritten(VirtualEngine):
    async def generate(self, request):
        return await super().generate(msgspec.structs.replace(request, written=0))


class TellsOfStrangers(VirtualEngine):
    async def partial_completions(self, ids):
        told = await super().partial_completions(ids)
        return {name: partial for name in ids for partial in told.values()}


class EndsWhatItTells(VirtualEngine):
    async def partial_completions(self, ids):
        told = await super().partial_completions(ids)
        await self.abort(ids)
        return told


class SwapsAtASnapshot(VirtualEngine):
    def hold(self, update, mode) -> None:
        super().hold(update, "swap" if mode == "snapshot" else mode)


class GivesSlotsAway(VirtualEngine):
    async def reserve(self, slot) -> None:
        await anyio.lowlevel.checkpoint()
        if self._held is not None and self._held.slot == slot:
            raise SyncError("held")


class GivesTheHeldSlotAway(VirtualEngine):
    async def reserve(self, slot) -> None:
        if self._held is None or self._held.slot != slot:
            await super().reserve(slot)


class NamesNobody(VirtualEngine):
    async def score(self, tokens, *, top=0):
        return await super().score(tokens)


@pytest.mark.parametrize(
    ("broken", "clause"),
    [
        (RelabelsAll, "span per version"),
        (IgnoresBudget, "no completion is longer than its budget"),
        (DependsOnCompany, "equal requests"),
        (KeepsCancelled, "cancelling generate frees"),
        (ForgetsPartials, "an aborted generate returns what it has"),
        (ForgetsWhatWasWritten, "a request that goes on returns what is new"),
        (TellsOfStrangers, "and no others"),
        (EndsWhatItTells, "to its own end"),
        (SwapsAtASnapshot, "live ones finish under the old"),
        (GivesSlotsAway, "reserve does not give it away"),
        (GivesTheHeldSlotAway, "the slot of the version held cannot be reserved"),
        (NamesNobody, "the likeliest tokens that were asked for"),
    ],
)
def test_broken_engines_are_caught(broken, clause: str) -> None:
    @asynccontextmanager
    async def make() -> AsyncGenerator[EngineCase]:
        async with broken(lengths=Fixed(500), max_context=128).running() as engine:

            async def stage(version: int) -> Update:
                return await staged(engine, version)

            yield EngineCase(engine=engine, stage=stage, prompt=np.arange(5, dtype=np.int32), context=128, tick_s=0.01)

    with pytest.raises((ContractError, ExceptionGroup)) as caught:
        run_virtual(check_engine, make, limit_s=10_000)
    assert clause in repr(caught.value)


def test_sync_that_flips_engines_one_by_one_is_caught() -> None:
    class OneByOne:
        def __init__(self, engines) -> None:
            self.engines = engines
            self.broken = ""
            self.exported = -1

        def fail_once(self, what: str) -> None:
            if self.broken == what:
                self.broken = ""
                raise SyncError(f"{what} broke")

        async def export(self, version: int) -> None:
            await anyio.lowlevel.checkpoint()
            self.exported = -1
            self.fail_once("export")
            self.exported = version

        async def deliver(self, version: int) -> Update:
            self.fail_once("deliver")
            if version != self.exported:
                raise SyncError("not exported")
            updates = [await staged(engine, version) for engine in self.engines]
            return updates[-1]

        async def catch_up(self, receiver) -> None:
            raise SyncError("not here")

        async def flip(self, update, mode) -> Flip:
            for at, engine in enumerate(self.engines):
                if at:
                    self.fail_once("flip")
                await engine.apply(update, mode)
            return Flip(pause_s=0.0)

        def stats(self):
            return {}

    @asynccontextmanager
    async def make() -> AsyncGenerator[SyncCase]:
        pool = VirtualPool([VirtualEngine(), VirtualEngine()])
        sync = OneByOne(pool.engines)

        async def versions() -> list[int]:
            return [(await engine.stats()).version for engine in pool.engines]

        def break_next(what: str) -> None:
            sync.broken = what

        yield SyncCase(sync=sync, versions=versions, break_next=break_next)

    with pytest.raises(ContractError, match="after a failed flip every engine"):
        run_virtual(check_sync, make)


def test_learner_that_moves_on_nothing_is_caught(tmp_path) -> None:
    class Restless(VirtualLearner):
        async def step(self, batch):
            self.state += 1
            return await super().step(batch)

    batch = VirtualAlgorithm().batch([samples.group(rewards=(0.0, 1.0))], step=0, version=0, oldest_trainable=[None])

    @asynccontextmanager
    async def make() -> AsyncGenerator[LearnerCase]:
        learner = Restless()
        yield LearnerCase(learner=learner, batch=batch, fingerprint=lambda: learner.state)

    with pytest.raises(ContractError, match="a batch without rows"):
        run_virtual(check_learner, make, tmp_path)


def test_inflight_policy_that_breaks_its_promise_is_caught() -> None:
    class Twice(SwapPolicy):
        async def land(self, traffic, flip, *, version) -> None:
            await flip("swap")
            await flip("swap")

    class Hasty(DrainPolicy):
        async def land(self, traffic, flip, *, version) -> None:
            await flip("swap")

    class Holds(DrainPolicy):
        async def land(self, traffic, flip, *, version) -> None:
            await super().land(traffic, flip, version=version)
            traffic.held.add("requests")

    class Interrupts(ResumePolicy):
        async def land(self, traffic, flip, *, version) -> None:
            async with traffic.interrupted():
                pass
            await flip("swap")

    class Mixes(SwapPolicy):
        one_version = "request"

    class MixesGroups(DrainPolicy):
        one_version = "group"

    class GivesUpFirst(SwapPolicy):
        async def land(self, traffic, flip, *, version) -> None:
            traffic.give_up(before_version=version)
            await flip("swap")

    class GivesUpAll(SwapPolicy):
        async def land(self, traffic, flip, *, version) -> None:
            await flip("swap")
            traffic.give_up(before_version=version)

    for policy, promise, clause in (
        (Twice, {}, "exactly once"),
        (Hasty, {"waits_for": "requests"}, "held back"),
        (Holds, {"waits_for": "requests"}, "nothing is held back"),
        (Interrupts, {"waits_for": "interrupted"}, "held back during the flip"),
        (SwapPolicy, {"mode": "snapshot"}, "the mode it promises"),
        (Mixes, {}, "to be of one version"),
        (MixesGroups, {"waits_for": "requests"}, "to be of one version"),
        (GivesUpFirst, {"gives_up_before": 7}, "before the flip has succeeded"),
        (GivesUpAll, {"gives_up_before": 6}, "and no others"),
        (GivesUpAll, {}, "and no others"),
    ):
        with pytest.raises((ContractError, ExceptionGroup)) as caught:
            run_virtual(lambda policy=policy, promise=promise: check_inflight(policy, **promise))
        assert clause in repr(caught.value)


def test_staleness_policy_that_counts_calls_or_refuses_the_present_is_caught() -> None:
    class Counts:
        def __init__(self) -> None:
            self.calls = 0

        def judge(self, subject, version) -> StalenessVerdict:
            self.calls += 1
            return StalenessVerdict(stale="enough" if self.calls > 20 else "")

    class RefusesEmpty:
        def judge(self, subject, version) -> StalenessVerdict:
            return StalenessVerdict(stale="" if any(e.sampled_versions() for e in subject.episodes) else "empty")

    shared = Counts()
    with pytest.raises(ContractError, match="the version alone"):
        check_staleness(lambda: shared)
    with pytest.raises(ContractError, match="present version"):
        check_staleness(RefusesEmpty)


def test_prompts_that_forget_their_place_are_caught() -> None:
    class Forgets(VirtualPrompts):
        def restore(self, state) -> None:
            pass

    class Repeats(VirtualPrompts):
        def next_prompt(self):
            found = super().next_prompt()
            return found and msgspec.structs.replace(found, id="0/0")

    with pytest.raises(ContractError, match="goes on with the prompt that would have come next"):
        check_prompts(lambda: Forgets(rows=9))
    with pytest.raises(ContractError, match="id of its own"):
        check_prompts(lambda: Repeats(rows=9))


def test_envs_scorers_and_sinks_that_break_their_contracts_are_caught() -> None:
    class Retokenises(VirtualEnv):
        async def play(self, *args, **kwargs):
            played = await super().play(*args, **kwargs)
            other = (msgspec.structs.replace(t, tokens=t.tokens + 1) if t.completion else t for t in played.turns)
            return msgspec.structs.replace(played, turns=tuple(other))

    class Shuffles(VirtualScorer):
        async def score(self, subject):
            done = await super().score(subject)
            return msgspec.structs.replace(done, episodes=tuple(reversed(done.episodes)))

    class Edits(RecordingSink):
        def log_metrics(self, step, values) -> None:
            values.clear()

    with pytest.raises(ContractError, match="exactly as sampled"):
        run_virtual(check_env, Retokenises, samples.prompt(id="0/1"))
    with pytest.raises((ContractError, ExceptionGroup)) as caught:
        run_virtual(check_scorer, Shuffles, samples.group(size=3))
    assert "same order" in repr(caught.value)
    with pytest.raises(ContractError, match="does not change"):
        check_sink(Edits)
