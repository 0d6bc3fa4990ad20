"""The pool over virtual engines, in virtual time: deaths, late replicas, half-failed publications, joining and leaving."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import anyio
import msgspec
import numpy as np
import pytest

from corrente import config as c
from corrente.controller import pipeline
from corrente.data.types import Completion, Request
from corrente.engine.base import EngineStats
from corrente.engine.launcher import Replica
from corrente.engine.pool.pool import EnginePool
from corrente.errors import GenerationError, SyncError, WorkerDied, root_cause
from corrente.sim.distributions import Fixed
from corrente.sim.engine import VirtualEngine
from corrente.sim.faults import Chaos
from corrente.sim.speed import Speed
from corrente.sim.sync import VirtualSync
from corrente.sync.base import Update, stage
from corrente.sync.layout import Layout
from corrente.sync.offers import SharedOffer
from corrente.testing import EngineCase, SyncCase, check_engine, check_sync, run_virtual, samples
from corrente.testing.world import World, build, flow

STEP_S = 0.1


class Breaking(Chaos):
    """Fails the stages that it is told to, once each."""

    def __init__(self) -> None:
        super().__init__()
        self.next: list[str] = []

    async def strike(self, stage, key, error) -> None:
        if stage in self.next:
            self.next.remove(stage)
            raise error(f"{stage} broke")


class Fleet:
    """Implements Launcher over virtual engines. ``up`` are those alive, by name; a start takes ``start_s``. ``first``: the faults
    of engines, by name, until they are started again."""

    def __init__(
        self,
        replicas: int,
        *,
        start_s: float = 1.0,
        tokens: int = 40,
        dies_at_start: int = 0,
        first: Mapping[str, Breaking] | None = None,
    ) -> None:
        self._first = dict(first or {})
        self.replicas, self._start_s, self._tokens = replicas, start_s, tokens
        self.dies_at_start = dies_at_start
        self.up: dict[str, VirtualEngine] = {}
        self.chaos: dict[str, Breaking] = {}
        self._deaths: dict[str, tuple[anyio.Event, list[str]]] = {}
        self.launches: list[str] = []

    def launch(self, index: int) -> AbstractAsyncContextManager[Replica]:
        return self.start(f"e{index}")

    @asynccontextmanager
    async def start(self, name: str, leaving: anyio.Event | None = None) -> AsyncGenerator[Replica]:
        self.launches.append(name)
        await anyio.sleep(self._start_s)
        if len(self.launches) > self.replicas and self.dies_at_start:
            self.dies_at_start -= 1
            raise WorkerDied(f"{name} died young")
        over, words = self._deaths[name] = anyio.Event(), list[str]()
        self.chaos[name] = self._first.pop(name, None) or Breaking()
        engine = VirtualEngine(
            lengths=Fixed(self._tokens), speed=Speed(step_s=STEP_S, per_sequence_s=0.0), chaos=self.chaos[name]
        )

        async def ended() -> WorkerDied:
            await over.wait()
            return WorkerDied(words[0])

        async with engine.running():
            self.up[name] = engine
            try:
                leaves = None if leaving is None else leaving.wait
                yield Replica(name=name, engine=engine, layout=Layout(()), ended=ended, leaving=leaves)
            finally:
                del self.up[name]
                engine.die(f"{name} was stopped")

    def kill(self, name: str) -> None:
        over, words = self._deaths[name]
        words.append(f"{name} was killed")
        self.up[name].die(words[0])
        over.set()


class Case(msgspec.Struct, kw_only=True, eq=False):
    pool: EnginePool
    fleet: Fleet
    sync: VirtualSync
    news: list[str]
    version: int = -1

    async def publish(self) -> None:
        self.version += 1
        await self.sync.flip(await stage(self.sync, self.version), "swap")

    @property
    def states(self) -> dict[str, str]:
        return self.pool.states()


@asynccontextmanager
async def _open(fleet: Fleet, **given) -> AsyncGenerator[Case]:
    news: list[str] = []
    pool = EnginePool(fleet, log_event=lambda _, text: news.append(text), **{"slack": 2, "deadline_s": 50.0, **given})
    sync = VirtualSync(pool)  # pyright: ignore[reportArgumentType]
    pool.catch_up_by(sync.catch_up)
    failure: BaseException | None = None
    async with anyio.create_task_group() as tasks:
        await tasks.start(pool.run)
        try:
            yield Case(pool=pool, fleet=fleet, sync=sync, news=news)
        except Exception as error:
            failure = error
        tasks.cancel_scope.cancel()
    if failure is not None:
        raise failure


def _run(body: Callable[[Case], Awaitable[None]], replicas: int = 2, *, fleet: Fleet | None = None, **given) -> None:
    async def main() -> None:
        async with _open(fleet or Fleet(replicas), **given) as case:
            await body(case)

    try:
        run_virtual(main, limit_s=10_000)
    except BaseExceptionGroup as group:
        raise root_cause(group) from group


def _request(name: str = "r", *, group: str = "", tokens: int = 1000) -> Request:
    return samples.request(id=name, group=group, max_tokens=tokens)


class Answers:
    """Requests under way, and what they came to."""

    def __init__(self, case: Case, tasks: anyio.abc.TaskGroup) -> None:
        self._case, self._tasks = case, tasks
        self.done: dict[str, Completion] = {}
        self.failed: dict[str, Exception] = {}

    def ask(self, name: str, *, group: str = "") -> None:
        self._tasks.start_soon(self._ask, name, group)

    async def _ask(self, name: str, group: str) -> None:
        try:
            self.done[name] = await self._case.pool.generate(_request(name, group=group))
        except GenerationError as error:
            self.failed[name] = error

    def spans(self, name: str) -> list[tuple[int, int]]:
        """Version and tokens of each span."""
        return [(s.version, s.stop - s.start) for s in self.done[name].spans]


async def _ready(case: Case, count: int) -> None:
    while (await case.pool.stats()).ready < count:
        await anyio.sleep(0.05)


# ---- contracts


def test_pool_of_two_keeps_the_contract_of_an_engine():
    @asynccontextmanager
    async def make() -> AsyncGenerator[EngineCase]:
        slots = iter((0, 1) * 100)

        async with _open(Fleet(2, tokens=1000)) as case:

            async def stage(version: int) -> Update:
                slot = next(slots)
                await case.pool.reserve(slot)
                await case.pool.receive(SharedOffer(version=version, slot=slot, nbytes=0))
                return Update(version=version, slot=slot)

            async def broken(version: int) -> Update:
                update = await stage(version)
                next(slots)
                for chaos in case.fleet.chaos.values():
                    chaos.next.append("apply")
                return update

            yield EngineCase(
                engine=case.pool,
                stage=stage,
                broken=broken,
                prompt=np.arange(8, dtype=np.int32),
                context=1 << 20,
                tick_s=STEP_S / 2,
            )

    run_virtual(check_engine, make, limit_s=10_000)


def test_sync_over_a_pool_of_two_keeps_its_contract():
    @asynccontextmanager
    async def make() -> AsyncGenerator[SyncCase]:
        async with _open(Fleet(2)) as case:

            def break_next(what: str) -> None:
                for chaos in case.fleet.chaos.values():
                    chaos.next.append({"deliver": "receive", "flip": "apply"}[what])

            async def versions() -> list[int]:
                return [(await engine.stats()).version for engine in case.fleet.up.values()]

            yield SyncCase(sync=case.sync, versions=versions, break_next=break_next, breaks=("deliver", "flip"))

    run_virtual(check_sync, make, limit_s=10_000)


# ---- requests


def test_requests_wait_for_the_first_weights_and_are_then_shared_out():
    async def body(case: Case) -> None:
        async with anyio.create_task_group() as tasks:
            answers = Answers(case, tasks)
            for at in range(8):
                answers.ask(f"r{at}", group=f"g{at // 2}")
            await anyio.sleep(30)
            assert case.states == {"e0": "STALE", "e1": "STALE"}
            assert (await case.pool.stats()).waiting == 8
            await case.publish()
            await anyio.sleep(STEP_S)
            assert [(await e.stats()).running for e in case.fleet.up.values()] == [4, 4]
        assert all(answers.spans(f"r{at}") == [(0, 40)] for at in range(8))

    _run(body)


def test_death_costs_time_and_nothing_else():
    """Its requests go to the other replica at once, from their beginning; it comes back with the version that is live then."""

    async def body(case: Case) -> None:
        await case.publish()
        async with anyio.create_task_group() as tasks:
            answers = Answers(case, tasks)
            for at in range(6):
                answers.ask(f"r{at}")
            await anyio.sleep(2.05)
            case.fleet.kill("e0")
            await anyio.sleep(STEP_S)
            assert case.states == {"e1": "READY"}
            assert (await case.fleet.up["e1"].stats()).running == 6
            assert case.news[0].startswith("e0 was killed; another replica is ready; it is replaced (restart 1 of 3)")
            await case.publish()
            await _ready(case, 2)
            assert case.news[-1] == "e0 is ready, at version 1"
            assert (await case.fleet.up["e0"].stats()).version == 1
        assert {len(done.tokens) for done in answers.done.values()} == {40}
        assert len(answers.done) == 6

    _run(body)


def test_partials_of_a_dead_replica_are_not_sampled_again():
    async def body(case: Case) -> None:
        await case.publish()
        async with anyio.create_task_group() as tasks:
            answers = Answers(case, tasks)
            answers.ask("a")
            answers.ask("b")
            await anyio.sleep(1.05)
            seen = await case.pool.partial_completions(["a", "b", "nobody"])
            assert {name: len(part.tokens) for name, part in seen.items()} == {"a": 10, "b": 10}
            await case.publish()
            await anyio.sleep(1)
            case.fleet.kill("e0")
            case.fleet.kill("e1")
        assert answers.spans("a") == answers.spans("b") == [(0, 10), (1, 30)]

    _run(body)


def test_requests_without_a_ready_replica_wait_until_their_deadline():
    async def body(case: Case) -> None:
        await case.publish()
        case.fleet.kill("e0")
        await anyio.sleep(0)
        with anyio.move_on_after(0.5) as scope:
            await case.pool.generate(_request())
        assert scope.cancelled_caught
        assert len((await case.pool.generate(_request())).tokens) == 40

    _run(body, replicas=1)


def test_aborting_a_request_that_waits_for_a_replica_returns_what_it_has():
    async def body(case: Case) -> None:
        async with anyio.create_task_group() as tasks:
            answers = Answers(case, tasks)
            answers.ask("a")
            await anyio.sleep(1)
            await case.pool.abort(["a"])
        assert answers.done["a"].finish_reason == "abort"
        assert not len(answers.done["a"].tokens)

    _run(body)


def test_request_that_replicas_die_of_fails_and_the_pool_lives_on():
    async def body(case: Case) -> None:
        await case.publish()
        async with anyio.create_task_group() as tasks:
            answers = Answers(case, tasks)
            answers.ask("poison")
            for _ in range(3):
                await _ready(case, 1)
                await anyio.sleep(0.5)
                for name in [n for n, e in case.fleet.up.items() if (await e.stats()).running]:
                    case.fleet.kill(name)
        assert "3 replicas died while they served it; the last: e" in str(answers.failed["poison"])
        assert len((await case.pool.generate(_request())).tokens) == 40

    _run(body)


# ---- replacement


def test_restarts_are_bounded_the_others_go_on_and_the_last_death_ends_the_run():
    async def body(case: Case) -> None:
        await case.publish()
        for _ in range(3):
            await _ready(case, 2)
            case.fleet.kill("e0")
            await anyio.sleep(0.1)
        assert sorted(case.fleet.launches) == sorted(["e0", "e1", "e0", "e0"])
        assert "all 2 restarts of this run are spent" in case.news[-1]
        await anyio.sleep(100)
        assert case.states == {"e1": "READY"}
        assert len((await case.pool.generate(_request())).tokens) == 40
        case.fleet.kill("e1")
        await anyio.sleep(1)
        raise AssertionError("still running")

    with pytest.raises(WorkerDied, match=r"^e1 was killed$"):
        _run(body, restarts=2)


def test_replacement_that_does_not_start_is_one_more_death():
    async def body(case: Case) -> None:
        await case.publish()
        case.fleet.kill("e0")
        await anyio.sleep(0.1)
        await _ready(case, 2)
        assert sorted(case.fleet.launches) == sorted(["e0", "e1", "e0", "e0", "e0"])
        assert sum("did not start: e0 died young" in text for text in case.news) == 2

    _run(body, fleet=Fleet(2, dies_at_start=2))


def test_only_replica_is_replaced_too_and_ends_the_run_when_it_may_not_be():
    async def body(case: Case) -> None:
        await case.publish()
        async with anyio.create_task_group() as tasks:
            answers = Answers(case, tasks)
            answers.ask("a")
            await anyio.sleep(1)
            case.fleet.kill("e0")
        assert answers.spans("a") == [(0, 40)]
        case.fleet.kill("e0")
        await anyio.sleep(5)
        raise AssertionError("still running")

    with pytest.raises(WorkerDied, match=r"^e0 was killed$"):
        _run(body, replicas=1, restarts=1)


# ---- publication


def test_replica_that_fails_to_flip_is_left_behind_and_comes_back():
    """Its live requests go on elsewhere from what they have; nothing it samples in between is used."""

    async def body(case: Case) -> None:
        await case.publish()
        async with anyio.create_task_group() as tasks:
            answers = Answers(case, tasks)
            for at in range(4):
                answers.ask(f"r{at}")
            await anyio.sleep(1.05)
            case.fleet.chaos["e0"].next.append("apply")
            await case.publish()
            assert case.states == {"e0": "STALE", "e1": "READY"}
            assert "e0: SyncError: apply broke" in case.news[0]
            await anyio.sleep(STEP_S / 2)
            assert (await case.fleet.up["e1"].stats()).running == 4
            await _ready(case, 2)
        assert {name: sum(n for _, n in answers.spans(name)) for name in answers.done} == dict.fromkeys(
            answers.done, 40
        )
        assert all([v for v, _ in answers.spans(name)] == [0, 1] for name in answers.done)

    _run(body)


def test_replica_that_fails_to_receive_serves_the_old_version_until_the_others_flip():
    async def body(case: Case) -> None:
        await case.publish()
        case.fleet.chaos["e1"].next.append("receive")
        update = await stage(case.sync, 1)
        assert case.states == {"e0": "READY", "e1": "READY"}
        await case.sync.flip(update, "swap")
        assert case.states == {"e0": "READY", "e1": "STALE"}
        await _ready(case, 2)
        assert [(await e.stats()).version for e in case.fleet.up.values()] == [1, 1]

    _run(body)


def test_replica_that_comes_late_to_a_run_that_publishes_all_the_time_arrives_and_stays():
    async def body(case: Case) -> None:
        await case.publish()
        case.fleet.kill("e0")
        for _ in range(60):
            await case.publish()
            await anyio.sleep(0.01)
        assert case.states == {"e0": "READY", "e1": "READY"}
        assert sum(text.startswith("e0 is ready") for text in case.news) == 1

    _run(body)


def test_flip_that_no_replica_makes_leaves_all_serving_the_old_version():
    async def body(case: Case) -> None:
        await case.publish()
        update = await stage(case.sync, 1)
        for chaos in case.fleet.chaos.values():
            chaos.next.append("apply")
        with pytest.raises(SyncError, match="no replica could apply version 1: e0: SyncError: apply broke; e1"):
            await case.sync.flip(update, "swap")
        assert case.states == {"e0": "READY", "e1": "READY"}
        assert (await case.pool.stats()).version == 0
        assert (await case.pool.generate(_request())).spans[0].version == 0
        await case.sync.flip(update, "swap")
        assert (await case.pool.generate(_request())).spans[0].version == 1

    _run(body)


def test_replica_that_is_stuck_is_given_up_and_the_others_flip():
    class Stuck(Breaking):
        async def strike(self, stage, key, error) -> None:
            if stage == "apply" and key == "1":
                await anyio.sleep_forever()

    async def body(case: Case) -> None:
        await case.publish()
        began_s = anyio.current_time()
        await case.publish()
        assert anyio.current_time() - began_s == pytest.approx(50, abs=1)
        assert case.states["e1"] == "READY"
        await _ready(case, 2)
        assert "e0 did not apply version 1 within 50 s, and was given up" in " ".join(case.news)

    _run(body, fleet=Fleet(2, first={"e0": Stuck()}))


def test_replica_that_lives_and_does_not_answer_is_replaced_and_what_it_was_at_goes_on():
    class Mute(VirtualEngine):
        async def stats(self) -> EngineStats:
            return await anyio.sleep_forever()

        async def generate(self, request: Request) -> Completion:
            return await anyio.sleep_forever()

    async def body(case: Case) -> None:
        await case.publish()
        case.fleet.up["e0"].__class__ = Mute
        async with anyio.create_task_group() as tasks:
            answers = Answers(case, tasks)
            for at in range(4):
                answers.ask(f"r{at}")
        assert len(answers.done) == 4
        assert 50 < anyio.current_time() < 70
        assert "e0 did not answer for 50 s, and was given up" in case.news[0]
        await _ready(case, 2)

    _run(body)


def test_replica_that_cannot_be_brought_up_to_date_is_replaced():
    class Deaf(Breaking):
        async def strike(self, stage, key, error) -> None:
            if stage in ("apply", "receive") and key != "0":
                raise error("deaf")

    async def body(case: Case) -> None:
        await case.publish()
        await case.publish()
        await _ready(case, 2)
        assert sorted(case.fleet.launches) == sorted(["e0", "e1", "e0"])
        assert "e0 could not be brought up to date in 4 attempts; the last: deaf" in " ".join(case.news)

    _run(body, fleet=Fleet(2, first={"e0": Deaf()}))


async def _refuse(ids: Sequence[str]) -> None:
    raise GenerationError("abort: 500; gave up after 6 attempts")


def test_abort_that_is_refused_is_one_error_once_the_others_were_asked():
    async def body(case: Case) -> None:
        await case.publish()
        case.fleet.up["e0"].abort = _refuse
        async with anyio.create_task_group() as tasks:
            answers = Answers(case, tasks)
            for name in ("r0", "r1"):
                answers.ask(name)
            await anyio.sleep(1)
            with pytest.raises(GenerationError, match="gave up after 6 attempts"):
                await case.pool.abort(["r0", "r1"])
        assert sorted(done.finish_reason for done in answers.done.values()) == ["abort", "stop"]

    _run(body)


def test_stale_replica_that_refuses_to_abort_is_emptied_and_comes_back():
    async def body(case: Case) -> None:
        await case.publish()
        case.fleet.up["e0"].abort = _refuse
        async with anyio.create_task_group() as tasks:
            answers = Answers(case, tasks)
            for at in range(4):
                answers.ask(f"r{at}")
            await anyio.sleep(1)
            case.fleet.chaos["e0"].next.append("apply")
            await case.publish()
            await _ready(case, 2)
        assert {len(done.tokens) for done in answers.done.values()} == {40}
        assert len(case.fleet.launches) == 2

    _run(body)


@pytest.mark.parametrize("seed", range(20))
def test_requests_are_answered_by_known_versions_under_kills_and_publishes_at_random_times(seed: int):
    """Versions grow along every completion, lengths are those undisturbed, and replicas that are ready hold what is live."""

    async def body(case: Case) -> None:
        rng = np.random.default_rng(seed)
        await case.publish()

        async def trouble() -> None:
            while True:
                await anyio.sleep(rng.uniform(0.2, 4))
                if case.fleet.up and rng.random() < 0.6:
                    case.fleet.kill(str(rng.choice(list(case.fleet.up))))
                else:
                    case.fleet.chaos[str(rng.choice(list(case.fleet.chaos)))].next.append(
                        str(rng.choice(["apply", "receive"]))
                    )

        async def publishing() -> None:
            while True:
                await anyio.sleep(rng.uniform(0.1, 3))
                case.version += 1
                update = None
                while update is None or (await case.pool.stats()).version != case.version:
                    try:
                        update = await stage(case.sync, case.version)
                        await case.sync.flip(update, "swap")
                    except SyncError:
                        await anyio.sleep(0.1)
                held = {n: (await e.stats()).version for n, e in case.fleet.up.items() if case.states.get(n) == "READY"}
                assert set(held.values()) <= {case.version}, (held, case.version)

        async with anyio.create_task_group() as background:
            background.start_soon(trouble)
            background.start_soon(publishing)
            async with anyio.create_task_group() as tasks:
                answers = Answers(case, tasks)
                for at in range(40):
                    answers.ask(f"r{at}", group=f"g{at // 4}")
                    await anyio.sleep(rng.uniform(0, 0.5))
            background.cancel_scope.cancel()
        assert len(answers.done) + len(answers.failed) == 40
        assert all("replicas died while they served it" in str(error) for error in answers.failed.values())
        for name, done in answers.done.items():
            versions = [version for version, _ in answers.spans(name)]
            assert len(done.tokens) == 40
            assert versions == sorted(set(versions))

    _run(body, replicas=3, restarts=1000)


# ---- joining and leaving


def test_replica_joins_takes_work_and_leaves_with_nothing_lost():
    async def body(case: Case) -> None:
        await case.publish()
        leaving = anyio.Event()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(case.pool.serve_joined, case.fleet.start("guest", leaving))
            await _ready(case, 2)
            assert (await case.fleet.up["guest"].stats()).version == 0
            answers = Answers(case, tasks)
            for at in range(4):
                answers.ask(f"r{at}")
            await anyio.sleep(1.05)
            assert (await case.fleet.up["guest"].stats()).running == 2
            await case.publish()
            await anyio.sleep(1)
            leaving.set()
            await anyio.sleep(STEP_S / 2)
            assert case.states == {"e0": "READY"}
            assert "guest" not in case.fleet.up
        assert [[version for version, _ in answers.spans(name)] for name in answers.done] == [[0, 1]] * 4
        assert [len(done.tokens) for done in answers.done.values()] == [40] * 4
        assert case.news == [
            "guest joined",
            "guest is ready, at version 0",
            "guest left; what it was at goes on elsewhere",
        ]

    _run(body, replicas=1)


def test_guest_that_dies_is_not_replaced():
    async def body(case: Case) -> None:
        await case.publish()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(case.pool.serve_joined, case.fleet.start("guest"))
            await _ready(case, 2)
            case.fleet.kill("guest")
            await anyio.sleep(10)
            assert case.states == {"e0": "READY"}

    _run(body, replicas=1)


# ---- a whole run


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(
    "inflight", [c.Swap(), c.Resume(), c.Drain(), c.OldWeights()], ids=lambda policy: type(policy).__name__
)
def test_run_whose_replicas_die_at_random_trains_every_prompt_once_and_within_the_bound(inflight, seed: int):
    """Behaviours 13 and 42 over a pool: nothing is lost, nothing twice, nothing older than the bound."""
    config = flow(steps=12, prompts=4, size=2, ahead=1, window=3, inflight=inflight, seed=seed)

    async def body(case: Case) -> None:
        rng = np.random.default_rng(seed)
        simulation = build(config, World(step_s=Fixed(3.0)))
        sync = VirtualSync(case.pool)  # pyright: ignore[reportArgumentType]
        case.pool.catch_up_by(sync.catch_up)
        parts = msgspec.structs.replace(simulation.parts, engine=case.pool, sync=sync)
        kills = 0

        async def trouble() -> None:
            nonlocal kills
            while True:
                await anyio.sleep(rng.uniform(6, 15))
                if case.fleet.up:
                    kills += 1
                    case.fleet.kill(str(rng.choice(list(case.fleet.up))))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(trouble)
            outcome = await pipeline.run(parts)
            tasks.cancel_scope.cancel()
        trained = [entry.prompt_id for entry in simulation.consumed]
        assert outcome.steps == 12
        assert kills > 1
        assert len(trained) == len(set(trained)) == 48
        assert outcome.counts.get("failed", 0) == 0
        assert max(entry.age for entry in simulation.consumed) <= (parts.plan.max_age or 0)

    _run(body, replicas=2, restarts=1000)
