"""The policy of some versions ago as its teacher, in virtual time: it follows the run, says what it is, and holds nobody up."""

from __future__ import annotations

from typing import Any

import anyio
import anyio.lowlevel
import msgspec
import numpy as np
import pytest

from corrente.config import RunConfig
from corrente.data.types import ApplyMode, Group, Scores, TeacherLogprobs, Tokens
from corrente.errors import SyncError
from corrente.score.base import ScoreResult
from corrente.score.combined import CombinedScorer, ScorerTerms
from corrente.score.teacher import TeacherSource
from corrente.sim.distributions import Fixed
from corrente.sync.base import Update
from corrente.sync.lagged import LaggedSync, VersionRing
from corrente.sync.offers import Offer
from corrente.testing import simulate
from corrente.testing.clock import run_virtual
from corrente.testing.world import LANDINGS, Simulation, World, build, flow, play


class VirtualTeacher:
    """A follower that takes ``fetch_s`` to get a version and ``score_s`` to score.

    What it scores with is written into its slots when it is fetched; a log-prob is minus the version that really lies where it
    looks. ``lost``: how often a version gets lost on its way.
    """

    def __init__(self, *, lag: int, fetch_s: float, score_s: float, lost: dict[int, int] | None = None) -> None:
        self._shelf, self._fetch_s, self._score_s, self._lost = VersionRing(lag), fetch_s, score_s, lost or {}
        self._slots = [-1] * self._shelf.slots
        self.used: list[int] = []

    async def reserve(self, slot: int) -> None:
        await anyio.lowlevel.checkpoint()

    async def receive(self, offer: Offer) -> None:
        spare = self._shelf.spare
        self._slots[spare] = -1  # half written
        await anyio.sleep(self._fetch_s)
        if self._lost.get(offer.version, 0):
            self._lost[offer.version] -= 1
            raise SyncError("the line broke")
        self._slots[spare] = offer.version

    async def apply(self, update: Update, mode: ApplyMode) -> float:
        self.used.append(self._shelf.put(update.version).version)
        return 0.0

    def members(self) -> int:
        return 1

    async def score(self, tokens: Tokens, *, top: int = 0) -> Scores:
        await anyio.sleep(self._score_s)
        used, count = self._shelf.used, len(tokens) - 1
        assert used is not None
        return Scores(
            logprobs=np.full(count, -float(self._slots[used.slot]), np.float32),
            top_ids=np.zeros((count, top), np.int32),
            top_logprobs=np.zeros((count, top), np.float32),
            version=used.version,
        )


class Rewarding:
    """A source beside the teacher, so that groups are worth training on."""

    name, single = "reward", False

    async def wait_until_ready(self) -> None:
        """See Source."""

    async def score_episodes(self, group: Group) -> Any:
        return [ScoreResult(score=float(e.index % 2)) for e in group.episodes]


class Noting:
    """A Scorer around another that notes what was taught, and which versions were live meanwhile."""

    def __init__(self, inner: CombinedScorer, sync: Any) -> None:
        self._inner, self._sync = inner, sync
        self.noted: list[tuple[int, int, TeacherLogprobs]] = []

    async def score(self, group: Group) -> Group:
        before = self._sync.published[-1][0]
        after = await self._inner.score(group)
        live = self._sync.published[-1][0]
        self.noted += [(before, live, taught) for e in after.episodes for taught in e.taught]
        return after

    def stats(self) -> dict[str, float]:
        return self._inner.stats()


def taught_run(
    config: RunConfig, teacher: VirtualTeacher, world: World, **how: Any
) -> tuple[Simulation, Noting, LaggedSync]:
    async def main() -> tuple[Simulation, Noting, LaggedSync]:
        simulation = build(config, world)
        sink = simulation.parts.sink
        followed = LaggedSync(simulation.sync, teacher, log_event=sink.log_event)
        source = TeacherSource(teacher, name="self", top=1)
        noting = Noting(CombinedScorer([(Rewarding(), ScorerTerms()), (source, ScorerTerms())]), simulation.sync)
        simulation.parts = msgspec.structs.replace(simulation.parts, sync=followed, scorer=noting)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(followed.run)
            await play(simulation, **how)
            tasks.cancel_scope.cancel()
        return simulation, noting, followed

    return run_virtual(main, seed=0, limit_s=1e6)


@pytest.mark.parametrize("lag", [1, 3])
@pytest.mark.parametrize("landing", LANDINGS, ids=lambda kind: type(kind).__name__)
def test_teacher_is_lag_versions_behind_and_says_what_it_is(landing: Any, lag: int):
    """``lag`` behind the live version, or one more while the newest is on its way to it; never a half-written one."""
    config = flow(steps=12, ahead=2, inflight=landing)
    simulation, noting, _ = taught_run(config, VirtualTeacher(lag=lag, fetch_s=0.3, score_s=0.2), World())
    assert simulation.counts["trained"] == 24
    assert len(noting.noted) >= 48
    for before, live, taught in noting.noted:
        assert taught.version is not None
        assert set(taught.logprobs.tolist()) == {-float(taught.version)}
        assert max(0, before - lag - 1) <= taught.version <= max(0, live - lag)
    assert max(taught.version for _, _, taught in noting.noted) >= 12 - lag - 4


def test_teacher_that_keeps_up_costs_the_run_nothing():
    """Bringing versions takes less time than a step: the run takes as long as with a scorer that is no slower, but for the first
    version, which the teacher needs before it can be asked."""
    config, world = flow(steps=12, ahead=1), World(score_s=Fixed(0.2))
    plain = simulate(config, world)
    simulation, _, followed = taught_run(config, VirtualTeacher(lag=1, fetch_s=0.7, score_s=0.2), world)
    assert simulation.elapsed_s == pytest.approx(plain.elapsed_s + 0.1 + 0.7)
    assert followed.stats()["publish/follower_wait_s"] == 0


def test_teacher_that_is_slow_to_fetch_holds_the_next_version_back_and_loses_none():
    """Ten times slower than a step: every version is waited for, or else the learner would overwrite it; and all arrive."""
    teacher = VirtualTeacher(lag=1, fetch_s=10.0, score_s=0.2)
    simulation, _, followed = taught_run(flow(steps=8, ahead=1), teacher, World())
    assert simulation.counts["trained"] == 16
    assert followed.stats()["publish/follower_wait_s"] > 5
    assert teacher.used == [0, *range(len(teacher.used) - 1)]
    assert len(teacher.used) >= 8


def test_version_that_does_not_reach_the_teacher_is_skipped_with_a_warning():
    """A line that breaks twice is tried a third time; one that breaks for good costs that version, and not the run."""
    teacher = VirtualTeacher(lag=1, fetch_s=0.1, score_s=0.2, lost={2: 2, 3: 3, 4: 9})
    simulation, noting, followed = taught_run(flow(steps=10, ahead=1), teacher, World())
    assert simulation.counts["trained"] == 20
    assert teacher.used[:8] == [0, 0, 1, 2, 5, 6, 7, 8]
    assert not {3, 4} & {taught.version for _, _, taught in noting.noted}
    assert followed.stats()["publish/follower_missed"] == 2
    lines = [line for level, line in simulation.sink.events if level == "warning"]
    assert [line for line in lines if "version 3 did not reach the follower: the line broke" in line]


def test_teacher_that_scores_slowly_throttles_admission_and_bounds_hold():
    """Back-pressure is the scorer's: groups wait for it, none is lost, and no token is older than the bound."""
    config = flow(steps=8, ahead=1)
    simulation, _, _ = taught_run(config, VirtualTeacher(lag=1, fetch_s=0.1, score_s=20.0), World())
    assert simulation.counts["trained"] == 16
    assert simulation.max_age <= 1
