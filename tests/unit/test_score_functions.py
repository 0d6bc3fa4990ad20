"""Reward functions of every kind, how their answers combine, and every way in which they fail alone."""

from __future__ import annotations

import asyncio
import copy
import functools
import math
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import msgspec
import numpy as np
import pytest

from corrente.common.threads import DaemonThreads, inline
from corrente.config import Reward, RunConfig
from corrente.data.types import Episode, Group
from corrente.errors import ConfigError
from corrente.score.base import ScoreResult
from corrente.score.build import open_scorer
from corrente.score.builtins import exact_line, exact_match
from corrente.score.calling import conversation_messages, function_columns
from corrente.score.functions import CALLS_AT_ONCE, FunctionsScorer, function_members
from corrente.score.resolve import (
    accepted_arguments,
    distinct_names,
    function_name,
    required_arguments,
    resolve_function,
)
from corrente.testing import samples
from corrente.testing.clock import run_virtual
from corrente.testing.stages import check_scorer


def _score(scorer: FunctionsScorer, group: Group) -> Group:
    return anyio.run(scorer.score, group)


def _one(function: Any, *texts: str, **options: Any) -> list[Episode]:
    return list(
        _score(
            FunctionsScorer([function], offload=inline, **options), samples.group(texts=texts or ("a", "bb"))
        ).episodes
    )


# ---- what is called, and with what -------------------------------------------------------------------------------------------


def test_exact_line_wants_the_answer_alone_on_the_first_line():
    texts = [" 13", "13\n", "13 \nand more", "113", "13.", "", "\n13", "13 14"]
    assert exact_line(texts, ["13"] * len(texts)) == [1, 1, 1, 0, 0, 0, 0, 0]
    assert exact_line(["13"], [13]) == [1]  # type: ignore[list-item]


def test_function_is_given_lists_over_the_group_it_has_parameters_for():
    seen: dict[str, Any] = {}
    given: dict[str, Any] = {}

    def everything(
        prompts: list[str], completions: list[str], completion_ids: list[list[int]], **function_columns: Any
    ):
        given.update(function_columns)
        seen.update(prompts=prompts, completions=completions, completion_ids=completion_ids, **function_columns)
        return [0.0] * len(completions)

    _score(
        FunctionsScorer([everything], offload=inline),
        samples.group(texts=["a", "bc"], prompt=samples.prompt(fields={"answer": "2", "level": 5})),
    )
    assert sorted(given) == ["answer", "level", "log_extra", "log_metric", "trainer_state"]
    assert {name: seen[name] for name in seen if not name.startswith(("log_", "trainer_"))} == {
        "prompts": ["1 + 1 ="] * 2,
        "completions": ["a", "bc"],
        "completion_ids": [[0], [0, 1]],
        "answer": ["2", "2"],
        "level": [5, 5],
    }
    assert [e.reward for e in _one(lambda completions: [len(c) for c in completions])] == [1.0, 2.0]
    assert [e.reward for e in _one(lambda *, answer: [float(a) for a in answer])] == [2.0, 2.0]


ASKED = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"})


def _chat(*texts: str, asked: Sequence[dict[str, Any]] = ASKED, **values: Any) -> Group:
    prompt = samples.prompt(text="<rendered>", messages=asked, fields={})
    return samples.group(prompt=prompt, texts=texts, **values)


def test_conversations_are_given_as_lists_of_messages():
    seen: list[Any] = []

    def look(prompts: Any, completions: Any) -> list[float]:
        seen.append(copy.deepcopy((prompts, completions)))
        prompts[0][0]["content"] = completions[0][0]["content"] = "changed"
        return [0.0] * len(completions)

    group = _chat("2", "two")
    _score(FunctionsScorer([look], offload=inline), group)
    assert seen[0] == ([list(ASKED)] * 2, [[{"role": "assistant", "content": text}] for text in ("2", "two")])
    _score(FunctionsScorer([look], offload=inline), group)
    assert seen[1] == seen[0], "what a function changes, another does not see"
    assert group.prompt.messages == ASKED


def test_conversation_that_was_played_is_given_as_it_was_played():
    called = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add"}}]}
    played = (called, {"role": "tool", "name": "add", "content": "2"}, {"role": "assistant", "content": "2"})
    given = function_columns(_chat("x", messages=played))
    assert given["completions"] == [list(played)]
    assert exact_match(given["completions"], [2]) == [1]


def test_answer_that_the_prompt_begins_is_given_whole_and_the_prompt_without_it():
    begun = {"role": "assistant", "content": "The sum is "}
    given = function_columns(_chat("2", asked=(*ASKED, begun)))
    assert given["prompts"] == [list(ASKED)]
    assert given["completions"] == [[{"role": "assistant", "content": "The sum is 2"}]]


def test_conversation_for_a_reward_model_goes_on_where_the_prompt_ends():
    answer = {"role": "assistant", "content": "2"}
    (episode,) = _chat("2").episodes
    assert conversation_messages(_chat("2").prompt, episode) == [*ASKED, answer]
    begun = _chat("2", asked=(*ASKED, {"role": "assistant", "content": "1 + "}))
    assert conversation_messages(begun.prompt, begun.episodes[0]) == [*ASKED, {"role": "assistant", "content": "1 + 2"}]
    assert conversation_messages(samples.group(texts=["2"]).prompt, samples.group(texts=["2"]).episodes[0]) == []


def test_environments_are_given_where_there_are_any():
    worlds = [object(), object()]

    def ask(environments: Any) -> list[float]:
        return [float(worlds.index(world)) for world in environments]

    group = samples.group(texts=["a", "b"])
    episodes = tuple(msgspec.structs.replace(e, environment=w) for e, w in zip(group.episodes, worlds, strict=True))
    played = msgspec.structs.replace(group, episodes=episodes)
    assert [e.reward for e in _score(FunctionsScorer([ask], offload=inline), played).episodes] == [0.0, 1.0]
    assert "environments" not in function_columns(group)


def test_rewards_of_an_environment_count_with_weight_one():
    group = samples.group(texts=["a", "bb"])
    won = msgspec.structs.replace(group.episodes[0], env_rewards={"game": 3.0, "bonus": None})
    played = msgspec.structs.replace(group, episodes=(won, group.episodes[1]))
    one, two = _score(FunctionsScorer([Lengths(0.5)], weights=[4.0], offload=inline), played).episodes
    assert (one.reward, one.scores) == (5.0, {"game": 3.0, "bonus": None, "Lengths": 0.5})
    assert (two.reward, two.scores) == (4.0, {"Lengths": 1.0})


class Lengths:
    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __call__(self, completions: Sequence[str]) -> list[float]:
        return [self.scale * len(c) for c in completions]


class AsyncLengths(Lengths):
    async def __call__(self, completions: Sequence[str]) -> list[float]:  # type: ignore[override]
        await anyio.lowlevel.checkpoint()
        return [self.scale * len(c) for c in completions]


def _scaled(scale: float, completions: Sequence[str]) -> list[float]:
    return [scale * len(c) for c in completions]


async def _async_scaled(scale: float, completions: Sequence[str]) -> list[float]:
    await anyio.lowlevel.checkpoint()
    return [scale * len(c) for c in completions]


@pytest.mark.parametrize(
    "function",
    [
        lambda completions: [2.0 * len(c) for c in completions],
        functools.partial(_scaled, 2.0),
        functools.partial(functools.partial(_async_scaled), 2.0),
        Lengths(2.0),
        AsyncLengths(2.0),
        Lengths(2.0).__call__,
        lambda completions: _async_scaled(2.0, completions),
        lambda completions: np.array([2.0 * len(c) for c in completions]),
        lambda completions: tuple(np.float32(2.0 * len(c)) for c in completions),
        lambda completions: (2.0 * len(c) for c in completions),
    ],
)
@pytest.mark.parametrize("offload", [inline, None])
def test_any_callable_scores_sync_or_async(function: Any, offload: Any):
    scored = _score(FunctionsScorer([function], offload=offload), samples.group(texts=["a", "bcd"]))
    assert [e.reward for e in scored.episodes] == [2.0, 6.0]
    assert all(e.status == "ok" for e in scored.episodes)


def test_closure_scores():
    counted: list[int] = []

    def counting(completions: list[str]) -> list[bool]:
        counted.append(len(completions))
        return [c == "a" for c in completions]

    assert [e.reward for e in _one(counting, "a", "b", "a")] == [1.0, 0.0, 1.0]
    assert counted == [3]


def test_function_that_changes_its_arguments_disturbs_no_other():
    def greedy(completions: list[str]) -> list[float]:
        completions.clear()
        return [0.0, 0.0]

    scorer = FunctionsScorer([greedy, lambda completions: [len(c) for c in completions]], offload=inline)
    assert [e.scores["lambda"] for e in _score(scorer, samples.group(texts=["a", "bb"])).episodes] == [1.0, 2.0]


def test_function_that_changes_a_column_changes_neither_other_episodes_nor_the_dataset():
    def popping(completions: list[str], tests: list[list[int]]) -> list[float]:
        return [float(of_one.pop() + len(of_one)) for of_one in tests]

    group = samples.group(texts=["a", "b", "c"], prompt=samples.prompt(fields={"tests": [1, 2]}))
    scorer = FunctionsScorer([popping], offload=inline)
    for _ in range(2):  # as in a later epoch
        assert [e.reward for e in _score(scorer, group).episodes] == [3.0, 3.0, 3.0]
    assert group.prompt.fields == {"tests": [1, 2]}


# ---- how answers combine -----------------------------------------------------------------------------------------------------


def test_reward_is_the_weighted_sum_and_each_score_is_kept():
    def short(completions: list[str]) -> list[float]:
        return [1.0 / len(c) for c in completions]

    scorer = FunctionsScorer([Lengths(1.0), short], weights=[0.5, 4.0], offload=inline)
    one, two = _score(scorer, samples.group(texts=["a", "bb"])).episodes
    assert one.scores == {"Lengths": 1.0, "short": 1.0}
    assert one.reward == 4.5
    assert two.scores == {"Lengths": 2.0, "short": 0.5}
    assert two.reward == 3.0


def test_none_is_left_out_of_the_sum_and_is_not_zero():
    def only_a(completions: list[str]) -> list[float | None]:
        return [5.0 if c == "a" else None for c in completions]

    def only_b(completions: list[str]) -> list[float | None]:
        return [-1.0 if c == "b" else None for c in completions]

    scorer = FunctionsScorer([only_a, only_b], weights=[2.0, 1.0], offload=inline)
    a, b, c = _score(scorer, samples.group(texts=["a", "b", "c"])).episodes
    assert (a.reward, b.reward, c.reward) == (10.0, -1.0, None)
    assert a.scores == {"only_a": 5.0, "only_b": None}
    assert all(e.status == "ok" for e in (a, b, c))


def test_episodes_that_failed_before_pass_through_and_are_not_scored():
    asked: list[list[str]] = []

    def score(completions: list[str]) -> list[float]:
        asked.append(completions)
        return [1.0] * len(completions)

    group = samples.group(texts=["a", "b", "c"])
    failed = samples.episode(index=1, versions=(), status="timeout", error="late")
    group = samples.group(episodes=[group.episodes[0], failed, group.episodes[2]])
    scored = _score(FunctionsScorer([score], offload=inline), group)
    assert asked == [["a", "c"]]
    assert [e.reward for e in scored.episodes] == [1.0, None, 1.0]
    assert scored.episodes[1] is failed
    only_failed = samples.group(episodes=[failed])
    assert _score(FunctionsScorer([score], offload=inline), only_failed) is only_failed


# ---- every way to fail -------------------------------------------------------------------------------------------------------


def _raises(completions: list[str]) -> list[float]:
    raise KeyError("gold")


def _exits(completions: list[str]) -> list[float]:
    sys.exit(3)


@pytest.mark.parametrize(
    ("function", "error"),
    [
        (_raises, "_raises: KeyError: 'gold'"),
        (lambda completions: [1.0], "lambda: answered with 1 values for 2 completions"),
        (lambda completions: [1.0] * 3, "lambda: answered with 3 values for 2 completions"),
        (lambda completions: 1.0, "lambda: answered with float"),
        (lambda completions: None, "lambda: answered with NoneType"),
        (lambda completions: "ab", "lambda: answered with str"),
        (lambda completions: {"a": 1, "b": 2}, "lambda: answered with dict"),
        (lambda gold: gold, "lambda: TypeError"),
    ],
)
def test_failing_function_costs_its_episodes_and_is_named(function: Any, error: str):
    for episode in _one(function):
        assert episode.status == "failed"
        assert episode.error.startswith(error)
        assert episode.reward is None


@pytest.mark.parametrize("how", ["exits", "is cancelled"])
def test_async_function_that_is_not_to_be_caught_costs_its_episodes_and_nothing_beside_it(how: str):
    async def leaves(completions: list[str]) -> list[float]:
        await anyio.lowlevel.checkpoint()
        if how == "exits":
            sys.exit(0)
        raise asyncio.CancelledError("a connection was closed")

    async def later(completions: list[str]) -> list[float]:
        await anyio.lowlevel.cancel_shielded_checkpoint()
        await anyio.sleep(0.001)
        return [1.0] * len(completions)

    def returned(awaitable: Any) -> Any:
        return lambda completions: awaitable(completions)

    ended = "SystemExit" if how == "exits" else "CancelledError"
    for function in (leaves, returned(leaves)):
        for episode in _score(
            FunctionsScorer([function, later], offload=inline), samples.group(texts=["a", "b"])
        ).episodes:
            assert episode.error.endswith(f": ended by {ended}")
            assert episode.scores == {"later": 1.0}


def test_function_that_exits_costs_its_episodes_and_not_the_run():
    scored = _score(FunctionsScorer([_exits]), samples.group(texts=["a", "b"]))
    assert [e.error for e in scored.episodes] == ["_exits: ended by SystemExit"] * 2


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, "1.0", b"1", object(), [1.0], 10**400])
def test_value_that_is_no_finite_number_costs_that_episode_alone(value: Any):
    good, bad = _one(lambda completions: [1.0, value])
    assert (good.status, good.reward) == ("ok", 1.0)
    assert (bad.status, bad.reward) == ("failed", None)
    assert bad.error.startswith("lambda: answered with")


def test_one_failing_function_leaves_the_other_ones_answer_on_record():
    scorer = FunctionsScorer([_raises, Lengths(1.0)], offload=inline)
    for episode in _score(scorer, samples.group(texts=["a", "bb"])).episodes:
        assert episode.status == "failed"
        assert episode.error.startswith("_raises")
        assert episode.scores == {"Lengths": len(episode.text)}


def test_async_function_past_its_deadline_times_out_by_name():
    async def hangs(completions: list[str]) -> list[float]:
        await anyio.sleep_forever()
        return []

    async def main() -> tuple[Group, float]:
        scored = await FunctionsScorer([hangs], deadline_s=20.0).score(samples.group(texts=["a", "b"]))
        return scored, anyio.current_time()

    scored, now_s = run_virtual(main)
    assert now_s == 20.0
    for episode in scored.episodes:
        assert episode.status == "timeout"
        assert episode.error.startswith("hangs: no answer within reward.deadline_s = 20 s")


def test_functions_of_a_group_and_groups_run_side_by_side():
    async def slow(completions: list[str]) -> list[float]:
        await anyio.sleep(2.0)
        return [1.0] * len(completions)

    async def slower(completions: list[str]) -> list[float]:
        await anyio.sleep(3.0)
        return [1.0] * len(completions)

    async def main() -> float:
        scorer = FunctionsScorer([slow, slower])
        async with anyio.create_task_group() as tasks:
            for _ in range(20):
                tasks.start_soon(scorer.score, samples.group(texts=["a", "b"]))
        return anyio.current_time()

    assert run_virtual(main) == 3.0


def test_blocking_function_does_not_hold_up_the_event_loop_or_other_groups():
    """Two blocking calls that can only end if both are running, and the loop turns meanwhile."""
    both = threading.Barrier(3, timeout=20)

    def blocks(completions: list[str]) -> list[float]:
        both.wait()
        return [1.0] * len(completions)

    async def main() -> list[Group]:
        scorer = FunctionsScorer([blocks])
        scored: list[Group] = []

        async def one() -> None:
            scored.append(await scorer.score(samples.group(texts=["a", "b"])))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(one)
            tasks.start_soon(one)
            await anyio.to_thread.run_sync(both.wait)
        return scored

    assert [e.reward for g in anyio.run(main) for e in g.episodes] == [1.0] * 4


def test_stuck_thread_is_left_behind_at_the_deadline():
    never, release = threading.Event(), []

    def stuck(completions: list[str]) -> list[float]:
        never.wait()
        release.append(True)
        return [1.0] * len(completions)

    scored = _score(FunctionsScorer([stuck], deadline_s=0.05), samples.group(texts=["a", "b"]))
    assert [e.status for e in scored.episodes] == ["timeout", "timeout"]
    assert not release
    never.set()


def test_wait_for_a_thread_is_not_part_of_the_deadline():
    """130 groups at once, a function of 0.4 s that has 64 threads: the last is asked after 0.8 s, and each call has 0.7 s."""

    async def main() -> tuple[list[Group], float]:
        threads, scored = anyio.CapacityLimiter(CALLS_AT_ONCE), []

        async def offload(call: Any) -> Any:
            async with threads:
                await anyio.sleep(0.4)
                return call()

        scorer = FunctionsScorer([Lengths(1.0)], deadline_s=0.7, offload=offload)

        async def one() -> None:
            scored.append(await scorer.score(samples.group(texts=["a", "bb"])))

        async with anyio.create_task_group() as tasks:
            for _ in range(130):
                tasks.start_soon(one)
        return scored, anyio.current_time()

    scored, now_s = run_virtual(main)
    assert now_s == pytest.approx(1.2)
    assert {e.status for group in scored for e in group.episodes} == {"ok"}


def test_function_whose_threads_all_hang_takes_none_of_another():
    never, hanging = threading.Event(), threading.Semaphore(0)

    def hangs(completions: list[str]) -> list[float]:
        hanging.release()
        never.wait()
        return [1.0] * len(completions)

    async def main() -> Sequence[ScoreResult]:
        (stuck, _), (free, _) = function_members([hangs, Lengths(1.0)])
        async with anyio.create_task_group() as tasks:
            for _ in range(CALLS_AT_ONCE):
                tasks.start_soon(stuck.score_episodes, samples.group(texts=["a"]))
            await anyio.to_thread.run_sync(lambda: [hanging.acquire(timeout=20) for _ in range(CALLS_AT_ONCE)])
            with anyio.fail_after(20):
                said = await free.score_episodes(samples.group(texts=["a", "bb"]))
            never.set()
        return said

    assert [mark.score for mark in anyio.run(main)] == [1.0, 2.0]


def test_stuck_threads_keep_their_place_under_the_limit():
    never = threading.Event()
    running: list[int] = []

    def stuck() -> None:
        running.append(1)
        never.wait()

    async def main() -> None:
        offload = DaemonThreads(limit=2)
        for _ in range(4):
            with anyio.move_on_after(0.05):
                await offload(stuck)

    anyio.run(main)
    assert len(running) == 2
    never.set()


def test_thread_gives_its_place_back_when_it_returns():
    async def main() -> list[int]:
        offload = DaemonThreads(limit=1)
        return [await offload(lambda n=n: n) for n in range(5)]

    assert anyio.run(main) == list(range(5))


def test_stuck_reward_does_not_keep_the_process_from_ending():
    code = """
import anyio, threading
from corrente.score.functions import FunctionsScorer
from corrente.testing import samples
def stuck(completions):
    threading.Event().wait()
print(anyio.run(FunctionsScorer([stuck], deadline_s=0.05).score, samples.group()).episodes[0].status)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "timeout", "")


# ---- names and where they come from ------------------------------------------------------------------------------------------


def test_names_say_what_a_function_is_and_never_repeat():
    functions = [exact_line, functools.partial(exact_line), Lengths(1.0), lambda completions: [], Lengths.__call__]
    assert [function_name(f) for f in functions] == ["exact_line", "exact_line", "Lengths", "lambda", "__call__"]
    assert distinct_names([exact_line, exact_line, exact_line]) == ("exact_line", "exact_line_2", "exact_line_3")


def test_signature_tells_what_is_accepted_and_needed():
    assert accepted_arguments(exact_line) == {"completions", "answer"}
    assert accepted_arguments(lambda completions, **rest: []) is None
    assert required_arguments(lambda completions, level=3, *, gold: []) == ("completions", "gold")
    assert required_arguments(functools.partial(_scaled, 2.0)) == ("completions",)


def test_function_comes_from_a_name_a_module_or_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "rewards_of_a_test.py").write_text("def one(completions):\n    return [1.0 for _ in completions]\n")
    assert resolve_function("exact_line") is exact_line
    assert resolve_function("corrente.score.builtins:exact_line") is exact_line
    from_file = resolve_function(f"{tmp_path}/rewards_of_a_test.py:one")
    assert from_file(completions=["a"]) == [1.0]
    assert resolve_function(f"{tmp_path}/rewards_of_a_test.py:one") is from_file
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    assert resolve_function("rewards_of_a_test:one")(completions=["a", "b"]) == [1.0, 1.0]


def test_files_of_one_name_in_two_folders_are_two_modules(tmp_path: Path):
    for folder, value in (("a", 1.0), ("b", 2.0)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "reward.py").write_text(f"def score(completions):\n    return [{value}]\n")
    assert [resolve_function(f"{tmp_path}/{folder}/reward.py:score")(completions=["x"]) for folder in "ab"] == [
        [1.0],
        [2.0],
    ]


def test_scorer_takes_functions_weights_and_deadline_from_the_config():
    reward = Reward(functions=("exact_line", "exact_line"), weights=(1.0, 0.5), deadline_s=2.0)

    async def main() -> Group:
        async with open_scorer(RunConfig(reward=reward), offload=inline) as scorer:
            assert scorer.names == ("exact_line", "exact_line_2")
            return await scorer.score(samples.group(texts=["2", "3"]))

    assert [e.reward for e in anyio.run(main).episodes] == [1.5, 0.0]


def test_wrong_weights_and_what_cannot_be_called_are_refused():
    with pytest.raises(ConfigError, match=r"reward\.weights has 1 values for 2"):
        FunctionsScorer([exact_line, exact_line], weights=[1.0])
    with pytest.raises(ConfigError, match="must be callable"):
        FunctionsScorer(["exact_line"])  # type: ignore[list-item]


@pytest.mark.parametrize("function", [Lengths(1.0), _raises, lambda completions: [None for _ in completions]])
def test_scorer_keeps_its_contract(function: Any):
    anyio.run(check_scorer, lambda: FunctionsScorer([function]), samples.group(texts=["a", "bb", "ccc"]))
