"""Many sources under terms of their own: limits, deadlines, policies, and what is reported of them. In virtual time."""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from corrente.common import serialization
from corrente.common.spawn import ANYWHERE, WorkerPlace, WorkerRole
from corrente.common.threads import call_inline
from corrente.config.rewards import RewardModelScorer
from corrente.data.types import Group, StepScore
from corrente.errors import ConfigError, WorkerDied
from corrente.score.base import ScoreResult
from corrente.score.batching import Batcher, pick_batch
from corrente.score.build import scorer_terms
from corrente.score.call_stats import percentile
from corrente.score.combined import ALWAYS_FAILING_AFTER, CombinedScorer, ScorerTerms
from corrente.score.functions import FunctionSource, FunctionsScorer, RunProgress
from corrente.score.messages import Opinion, Sample
from corrente.score.models import ModelProcess, RewardModelSource
from corrente.testing import samples
from corrente.testing.clock import run_virtual
from corrente.testing.stages import check_scorer


class Source:
    """Takes ``wait_s`` for each call and answers what ``answer`` says of the group."""

    def __init__(
        self,
        answer: Callable[[Group], Sequence[ScoreResult]],
        *,
        name: str = "it",
        single: bool = False,
        wait_s: float = 0.0,
    ) -> None:
        self.name, self.single = name, single
        self._answer, self._wait_s = answer, wait_s
        self.running = self.most = 0
        self.asked: list[int] = []

    async def wait_until_ready(self) -> None:
        await anyio.lowlevel.checkpoint()

    async def score_episodes(self, group: Group) -> Sequence[ScoreResult]:
        self.asked.append(len(group.episodes))
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await anyio.sleep(self._wait_s)
            return self._answer(group)
        finally:
            self.running -= 1


def ones(group: Group) -> list[ScoreResult]:
    return [ScoreResult(score=1.0) for _ in group.episodes]


def fails(group: Group) -> list[ScoreResult]:
    raise KeyError("gold")


def scored(panel: CombinedScorer, *groups: Group) -> tuple[list[Group], float]:
    """Groups scored at once, and when that was done."""

    async def main() -> tuple[list[Group], float]:
        out: list[Group | None] = [None] * len(groups)

        async def one(at: int, subject: Group) -> None:
            out[at] = await panel.score(subject)

        async with anyio.create_task_group() as tasks:
            for at, subject in enumerate(groups):
                tasks.start_soon(one, at, subject)
        return [g for g in out if g is not None], anyio.current_time()

    return run_virtual(main)


def test_limit_makes_calls_wait_and_the_wait_is_not_part_of_the_deadline():
    source = Source(ones, wait_s=2.0)
    panel = CombinedScorer([(source, ScorerTerms(at_once=2, deadline_s=3.0))])
    groups, now_s = scored(panel, *(samples.group(texts=["a", "b"]) for _ in range(8)))
    assert now_s == 8.0
    assert source.most == 2
    assert all(e.status == "ok" for g in groups for e in g.episodes)
    stats = panel.stats()
    assert stats["score/it_calls"] == 8.0
    assert (stats["score/it_queue"], stats["score/it_running"]) == (0.0, 0.0)
    assert stats["score/it_queue_max"] == 8.0
    assert (stats["score/it_latency_mean_s"], stats["score/it_latency_p95_s"]) == (2.0, 2.0)
    assert stats["score/it_wait_mean_s"] == 3.0
    assert stats["score/it_wait_p95_s"] == 6.0


def test_single_source_is_asked_about_one_episode_at_a_time_all_at_once():
    source = Source(lambda g: [ScoreResult(score=float(len(g.episodes[0].text)))], single=True, wait_s=1.0)
    groups, now_s = scored(CombinedScorer([(source, ScorerTerms())]), samples.group(texts=["a", "bbb", "cc"]))
    assert [e.reward for e in groups[0].episodes] == [1.0, 3.0, 2.0]
    assert (source.asked, source.most, now_s) == ([1, 1, 1], 3, 1.0)


def test_one_slow_source_makes_no_other_wait():
    slow, quick = Source(ones, name="slow", wait_s=5.0), Source(ones, name="quick")
    panel = CombinedScorer([(slow, ScorerTerms(at_once=1)), (quick, ScorerTerms())])
    _, now_s = scored(panel, samples.group(texts=["a"]), samples.group(texts=["a"]))
    assert now_s == 10.0
    assert panel.stats()["score/quick_latency_mean_s"] == 0.0


@pytest.mark.parametrize(
    ("failure", "status", "reward", "scores"),
    [
        ("lose", "failed", None, {"fine": 1.0}),
        ("none", "ok", 1.0, {"fine": 1.0, "it": None}),
        ("default", "ok", -3.0, {"fine": 1.0, "it": -2.0}),
    ],
)
def test_failure_costs_what_the_policy_says(failure: Any, status: str, reward: float | None, scores: Any):
    terms = ScorerTerms(failure=failure, default=-2.0, weight=2.0)
    panel = CombinedScorer([(Source(ones, name="fine"), ScorerTerms()), (Source(fails), terms)])
    (result,), _ = scored(panel, samples.group(texts=["a"]))
    (episode,) = result.episodes
    assert (episode.status, episode.reward, episode.scores) == (status, reward, scores)
    assert re.fullmatch(
        r"it: KeyError: 'gold' \(.*test_score_combined\.py:\d+\)" if status == "failed" else "", episode.error
    )
    assert panel.stats()["score/it_failed"] == 1.0


def test_deadline_costs_what_the_policy_says_and_is_counted_apart():
    terms = ScorerTerms(failure="default", default=0.5, deadline_s=1.0)
    panel = CombinedScorer([(Source(ones, wait_s=60.0), terms)])
    (result,), now_s = scored(panel, samples.group(texts=["a", "b"]))
    assert now_s == 1.0
    assert [e.reward for e in result.episodes] == [0.5, 0.5]
    stats = panel.stats()
    assert (stats["score/it_failed"], stats["score/it_timeouts"]) == (0.0, 1.0)


def test_policy_is_for_exceptions_one_that_only_fails_loses_episodes_after_all():
    panel = CombinedScorer([(Source(fails), ScorerTerms(failure="default"))])

    async def main() -> list[str]:
        return [
            (await panel.score(samples.group(texts=["a"]))).episodes[0].status for _ in range(ALWAYS_FAILING_AFTER + 2)
        ]

    assert run_virtual(main) == ["ok"] * (ALWAYS_FAILING_AFTER - 1) + ["failed"] * 3


def test_number_of_marks_must_be_that_of_the_episodes():
    (result,), _ = scored(
        CombinedScorer([(Source(lambda _: [ScoreResult(score=1.0)]), ScorerTerms())]), samples.group(texts=["a", "b"])
    )
    assert {e.error for e in result.episodes} == {"it: gave 1 marks for 2 episodes"}


def test_steps_are_weighted_and_those_of_several_sources_add_up():
    def steps(score: float) -> Callable[[Group], list[ScoreResult]]:
        return lambda g: [ScoreResult(score=score, steps=(StepScore(0, 0, 1, score),)) for _ in g.episodes]

    panel = CombinedScorer(
        [(Source(steps(0.5), name="a"), ScorerTerms(weight=2.0)), (Source(steps(3.0), name="b"), ScorerTerms())]
    )
    (result,), _ = scored(panel, samples.group(texts=["x"]))
    (episode,) = result.episodes
    assert episode.step_scores == (StepScore(0, 0, 1, 1.0), StepScore(0, 0, 1, 3.0))
    assert episode.reward == 4.0


def test_two_sources_of_one_name_are_refused():
    with pytest.raises(ConfigError, match="two scorers are called 'it'"):
        CombinedScorer([(Source(ones), ScorerTerms()), (Source(ones), ScorerTerms())])


def test_panel_keeps_the_contract_of_a_scorer():
    async def main() -> None:
        await check_scorer(
            lambda: CombinedScorer(
                [(Source(ones, name="a"), ScorerTerms(at_once=1)), (Source(fails), ScorerTerms(failure="none"))]
            ),
            samples.group(texts=["a", "bb", "ccc"]),
        )

    run_virtual(main)


# ---- TRL's signature ---------------------------------------------------------------------------------------------------------


def test_state_says_how_far_the_run_is():
    seen: list[Any] = []

    def watching(completions: list[str], trainer_state: Any) -> list[float]:
        seen.append(trainer_state)
        return [0.0] * len(completions)

    scorer = FunctionsScorer([watching], offload=call_inline, state_of=RunProgress(every=2, max_steps=50))
    scored(scorer, samples.group(texts=["a"], admitted_version=7))
    (state,) = seen
    assert (state.global_step, state.max_steps, state.epoch) == (14, 50, 0.0)


def test_logged_columns_are_kept_with_the_episodes_and_metrics_are_averaged():
    def logging(completions: list[str], log_extra: Any, log_metric: Any) -> list[float]:
        log_extra("length", [len(c) for c in completions])
        log_metric("mean_length", sum(map(len, completions)) / len(completions))
        return [0.0] * len(completions)

    scorer = FunctionsScorer([logging], offload=call_inline)
    (first, second), _ = scored(scorer, samples.group(texts=["a", "bbb"]), samples.group(texts=["cccc"]))
    assert [e.extra for e in (*first.episodes, *second.episodes)] == [{"length": 1}, {"length": 3}, {"length": 4}]
    assert scorer.stats()["logged/mean_length"] == 3.0
    assert "logged/mean_length" not in scorer.stats()


def test_logged_values_can_be_written_whatever_they_are():
    def logging(completions: list[str], log_extra: Any) -> list[float]:
        log_extra("number", [np.float32(0.5), np.int64(3)])
        log_extra("other", [object, 1 << 80])
        log_extra("nested", [{"a": [1, None]}, np.zeros(2)])
        return [0.0] * len(completions)

    (result,), _ = scored(FunctionsScorer([logging], offload=call_inline), samples.group(texts=["a", "b"]))
    first, second = (e.extra for e in result.episodes)
    assert first == {"number": 0.5, "other": "<class 'object'>", "nested": {"a": [1, None]}}
    assert second == {"number": 3, "other": 1 << 80, "nested": [0.0, 0.0]}
    json.dumps([first, second])
    serialization.encode(result)


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (lambda log_extra, log_metric: log_extra("x", [1]), "log_extra('x'): 1 values for 2 completions"),
        (lambda log_extra, log_metric: log_metric("x", float("nan")), "log_metric('x'): nan is not a finite number"),
    ],
)
def test_wrong_logging_is_the_functions_fault(wrong: Any, error: str):
    (result,), _ = scored(FunctionsScorer([wrong], offload=call_inline), samples.group(texts=["a", "b"]))
    assert all(e.error.startswith(f"lambda: ValueError: {error} ({__file__}:") for e in result.episodes)


def test_answer_that_breaks_while_it_is_read_is_the_functions_fault():
    def breaks(completions: list[str]) -> Any:
        return (1 / (at - 1) for at, _ in enumerate(completions))

    (result,), _ = scored(FunctionsScorer([breaks], offload=call_inline), samples.group(texts=["a", "b"]))
    assert all(e.error.startswith("breaks: ZeroDivisionError: ") for e in result.episodes)


def test_function_source_is_not_single_and_has_the_name_it_was_given():
    source = FunctionSource(len, name="mine", offload=call_inline, state_of=RunProgress())
    assert (source.name, source.single) == ("mine", False)


# ---- batches -----------------------------------------------------------------------------------------------------------------


def test_batch_is_built_around_who_waits_longest():
    assert pick_batch([10, 100, 11, 9, 50], most=3, cells=1000) == [0, 2, 3]
    assert pick_batch([10, 100, 11, 9, 50], most=9, cells=45) == [0, 2, 3]
    assert pick_batch([100, 1, 1], most=9, cells=50) == [0]
    assert pick_batch([5], most=1, cells=1) == [0]


def test_batches_grow_with_load_and_nobody_is_forgotten():
    batches: list[int] = []

    async def forward(samples: list[Sample]) -> list[Opinion]:
        batches.append(len(samples))
        await anyio.sleep(1.0)
        return [Opinion(score=float(len(s.completion))) for s in samples]

    async def main() -> tuple[list[float | None], float]:
        batcher = Batcher(forward, batch=4, cells=1000)
        scores: list[float | None] = [None] * 9

        async def one(at: int) -> None:
            scores[at] = (await batcher.ask(Sample(completion="x" * at))).score

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(batcher.run)
            async with anyio.create_task_group() as asking:
                asking.start_soon(one, 0)
                await anyio.sleep(0.5)
                for at in range(1, 9):
                    asking.start_soon(one, at)
            now_s = anyio.current_time()
            tasks.cancel_scope.cancel()
        return scores, now_s

    scores, now_s = run_virtual(main)
    assert scores == [float(at) for at in range(9)]
    assert (batches, now_s) == ([1, 4, 4], 3.0)


class ModelWorkers:
    """A spawner of workers with a model that takes ``wait_s`` for a batch. Implements Spawner, and Worker."""

    label, output = "a model", ""

    def __init__(self, wait_s: float) -> None:
        self.wait_s, self.stopped = wait_s, False

    async def spawn(self, role: WorkerRole, *, place: WorkerPlace = ANYWHERE, log: Path | None = None) -> ModelWorkers:
        return self

    async def call(self, body: Any, kind: Any, **more: Any) -> Any:
        await anyio.sleep(self.wait_s)
        return [Opinion(score=1.0) for _ in body.samples]

    async def ended(self) -> WorkerDied:
        raise AssertionError("nobody asks")

    async def stop(self, within_s: float) -> None:
        self.stopped = True


@pytest.mark.parametrize(("wait_s", "status", "ended_s"), [(1.0, "ok", 8.0), (5.0, "timeout", 1.5)])
def test_deadline_of_a_model_is_that_of_a_batch_and_not_of_the_wait_for_one(wait_s: float, status: str, ended_s: float):
    """Eight groups at once, a batch each; each batch has 1.5 s."""
    workers = ModelWorkers(wait_s)
    process = ModelProcess(
        "a:function", {}, name="rm", spawner=workers, batch=1 if status == "ok" else 8, deadline_s=1.5
    )
    panel = CombinedScorer([(RewardModelSource(process), scorer_terms(RewardModelScorer(path="rm", deadline_s=1.5)))])

    async def main() -> tuple[list[Group], float]:
        scored: list[Group] = []
        await process.open()

        async def one() -> None:
            scored.append(await panel.score(samples.group(texts=["a"])))

        async with anyio.create_task_group() as tasks:
            async with anyio.create_task_group() as asking:
                for _ in range(8):
                    asking.start_soon(one)
                await anyio.wait_all_tasks_blocked()
                tasks.start_soon(process.run)
            now_s = anyio.current_time()
            tasks.cancel_scope.cancel()
        return scored, now_s

    groups, now_s = run_virtual(main)
    assert {e.status for g in groups for e in g.episodes} == {status}
    assert (now_s, workers.stopped) == (ended_s, status != "ok")
    assert panel.stats()["score/rm_timeouts"] == (8.0 if status != "ok" else 0.0)


def test_batcher_forgets_a_question_that_was_given_up():
    batches: list[int] = []

    async def forward(samples: list[Sample]) -> list[Opinion]:
        batches.append(len(samples))
        await anyio.sleep(1.0)
        return [Opinion(score=1.0) for _ in samples]

    async def main() -> None:
        batcher = Batcher(forward, batch=1, cells=1)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(batcher.run)
            async with anyio.create_task_group() as asking:
                asking.start_soon(batcher.ask, Sample())
                await anyio.sleep(0.1)
                with anyio.move_on_after(0.5):
                    await batcher.ask(Sample())
            await anyio.sleep(2.0)
            tasks.cancel_scope.cancel()

    run_virtual(main)
    assert batches == [1]


def test_percentile_is_the_nearest_rank():
    assert percentile(deque(range(1, 101)), 0.95) == 95
    assert percentile([3.0], 0.95) == 3.0
    assert percentile([1.0, 2.0], 0.95) == 2.0
    assert percentile([1.0, 2.0], 0.5) == 1.0


def test_rewards_that_add_up_to_too_much_cost_their_episode():
    big = Source(lambda g: [ScoreResult(score=9e17 if e.text == "a" else 1.0) for e in g.episodes], name="big")
    also = Source(lambda g: [ScoreResult(score=9e17 if e.text == "a" else 1.0) for e in g.episodes], name="also")
    (result,), _ = scored(
        CombinedScorer([(big, ScorerTerms()), (also, ScorerTerms())]), samples.group(texts=["a", "b"])
    )
    lost, fine = result.episodes
    assert (lost.status, fine.status, fine.reward) == ("failed", "ok", 2.0)
    assert lost.error == "the reward adds up to 1.8e+18 (big 9e+17, also 9e+17); it must be at most 1e+18 in size"
