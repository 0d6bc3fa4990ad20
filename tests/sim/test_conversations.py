"""Conversations under the virtual clock: what waits for what, what ends them, what is counted, and what is closed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from tests.unit.chat_tokenizers import FORGETS, WITH_TOOLS, chat_renderer

from corrente.common import serialization
from corrente.common.threads import call_inline
from corrente.config.env import Tools
from corrente.data.types import Completion, Prompt, Request, Sampling
from corrente.env.base import PlayedEpisode
from corrente.env.conversation import Conversation, EnvSetup
from corrente.env.environment import Observation
from corrente.env.instance import EnvInstance
from corrente.env.pool import InstancePool
from corrente.env.tools import tool_schema
from corrente.errors import GenerationError, RolloutError
from corrente.testing import samples
from corrente.testing.clock import run_virtual
from corrente.testing.stages import check_env

Script = Callable[[int, str], str | Completion]
"""What the policy says, by the turn and the text it reads."""


async def slow(seconds: float) -> str:
    """Waits.

    Args:
        seconds: how long
    """
    await anyio.sleep(seconds)
    return f"waited {seconds:g}"


def add(a: int, b: int) -> int:
    """Adds.

    Args:
        a: one
        b: another
    """
    return a + b


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


class Table:
    """A Conversation, the policy that plays it by a script, and what was seen."""

    def __init__(
        self,
        script: Script,
        *,
        functions: tuple[Any, ...] = (),
        factory: Callable[[], Any] | None = None,
        limit: int = 0,
        context: int = 4096,
        max_tokens: int = 400,
        decode_s: float = 1.0,
        shown: bool = True,
        template: str = WITH_TOOLS,
        **rules: Any,
    ) -> None:
        self.script, self.decode_s = script, decode_s
        self.events: list[str] = []
        self.requests: list[Request] = []
        given = Tools(**rules)

        async def make() -> EnvInstance:
            return EnvInstance(
                factory() if factory else None, functions=functions, offload=call_inline, deadline_s=given.deadline_s
            )

        self.pool = InstancePool(make, limit=limit, log_event=lambda level, message: self.events.append(message))
        stage = EnvInstance(factory() if factory else None, functions=functions, offload=call_inline, deadline_s=1)
        renderer, self.tokenizer = chat_renderer(template, tools=[tool_schema(f) for f in stage.functions])
        self.env = Conversation(
            {"": EnvSetup(pool=self.pool, renderer=renderer)},
            sampling=Sampling(max_tokens=max_tokens),
            rules=given,
            context=context,
            shown=shown,
        )

    async def generate(self, request: Request) -> Completion:
        turn = int(request.id.rpartition("/")[2])
        self.requests.append(request)
        await anyio.sleep(self.decode_s)
        answer = self.script(turn, self.tokenizer.decode(request.tokens))
        if isinstance(answer, Completion):
            return answer
        done = self.tokenizer.completion(answer)
        budget = request.sampling.max_tokens
        if len(done.tokens) > budget:
            return self.tokenizer.completion(self.tokenizer.decode(done.tokens[:budget]), end="", finish="length")
        return done

    async def play(self, prompt: Prompt | None = None, *, key: str = "3/0", seed: int = 5) -> PlayedEpisode:
        return await self.env.play(prompt or task(), self.generate, key=key, group="3", seed=seed)


def task(text: str = "go", row: int = 0, **fields: Any) -> Prompt:
    messages = ({"role": "user", "content": text},)
    return samples.prompt(id=f"0/{row}", text=text, messages=messages, fields=fields)


def played(table: Table, **how: Any) -> PlayedEpisode:
    return run_virtual(lambda: table.play(**how))


# ---- tools -----------------------------------------------------------------------------------------------------------


def test_calls_of_a_turn_run_side_by_side_and_are_answered_in_order() -> None:
    def script(turn: int, read: str) -> str:
        return call("slow", seconds=9) + call("add", a=1, b=2) + call("slow", seconds=4) if turn == 0 else "done"

    async def main() -> tuple[PlayedEpisode, float]:
        done = await Table(script, functions=(slow, add)).play()
        return done, anyio.current_time()

    done, elapsed_s = run_virtual(main)
    assert elapsed_s == pytest.approx(1 + 9 + 1)
    assert [m["content"] for m in done.messages if m["role"] == "tool"] == ["waited 9", "3", "waited 4"]
    assert [m["role"] for m in done.messages] == ["assistant", "tool", "tool", "tool", "assistant"]
    assert done.metrics["tools/calls"] == 3
    assert done.metrics["env/turns"] == 2


@pytest.mark.parametrize(
    ("spoken", "answer", "kind"),
    [
        ("<tool_call>add(1, 2)</tool_call>", "cannot be read", "malformed"),
        (call("multiply", a=1), "there is no tool 'multiply'; there is: add, slow", "unknown"),
        (call("add", a=1), "TypeError", "raised"),
        (call("slow", seconds=99), "no answer within 30 s", "late"),
    ],
)
def test_call_with_any_fault_is_answered_and_counted(spoken: str, answer: str, kind: str) -> None:
    table = Table(lambda turn, read: spoken if turn == 0 else "I see", functions=(add, slow))
    done = played(table)
    (told,) = [m for m in done.messages if m["role"] == "tool"]
    assert answer in told["content"]
    assert told["content"] in table.tokenizer.decode(table.requests[1].tokens)
    assert (done.metrics["tools/failures"], done.metrics[f"tools/{kind}"]) == (1, 1)
    assert not done.cut


def test_tool_text_is_given_and_sampled_text_is_sampled() -> None:
    table = Table(lambda turn, read: call("add", a=20, b=3) if turn == 0 else "it is 23", functions=(add,))
    done = played(table)
    assert [(t.speaker, t.completion is not None, t.parent) for t in done.turns] == [
        ("user", False, None),
        ("policy", True, 0),
        ("tool", False, 1),
        ("policy", True, 2),
    ]
    assert table.tokenizer.decode(done.turns[2].tokens) == "\n<|tool|>23<|end|>\n<|assistant|>"
    assert done.metrics["env/forks"] == 0


def test_turns_are_bounded_and_the_last_call_is_still_made() -> None:
    table = Table(lambda turn, read: call("add", a=turn, b=0), functions=(add,), max_turns=3)
    done = played(table)
    assert done.metrics["env/turns"] == 3
    assert [m["content"] for m in done.messages if m["role"] == "tool"] == ["0", "1", "2"]
    assert len(table.requests) == 3


def test_members_of_a_group_share_their_first_context_and_nothing_else() -> None:
    table = Table(lambda turn, read: call("add", a=1, b=1) if turn == 0 else "2", functions=(add,))

    async def main() -> None:
        await table.play(key="3/0")
        await table.play(key="3/1", seed=8)

    run_virtual(main)
    first = [r for r in table.requests if r.id.endswith("/0")]
    assert len({r.group for r in first}) == 1
    assert first[0].group.startswith("3/")
    assert {r.group for r in table.requests if r.id.endswith("/1")} == {""}
    assert [r.seed for r in table.requests] == [5, 6, 8, 9]


# ---- lengths ---------------------------------------------------------------------------------------------------------


def test_turn_cut_by_length_ends_the_conversation_and_says_so() -> None:
    done = played(Table(lambda turn, read: call("add", a=1, b=1), functions=(add,), max_tokens=10))
    assert done.turns[-1].completion is not None
    assert done.turns[-1].completion.finish_reason == "length"
    assert len(done.turns[-1].tokens) == 10
    assert done.cut
    assert done.metrics["tools/calls"] == 0


@pytest.mark.parametrize("limit", [150, 200, 333])
def test_whole_conversation_stays_below_its_total(limit: int) -> None:
    table = Table(lambda turn, read: call("add", a=1, b=1), functions=(add,), max_total_tokens=limit, max_turns=50)
    done = played(table)
    sampled = sum(len(t.tokens) for t in done.turns if t.completion is not None)
    after = sum(len(t.tokens) for t in done.turns[1:])
    assert done.cut
    assert sampled <= limit
    last = max(at for at, t in enumerate(done.turns) if t.completion is not None)
    assert sum(len(t.tokens) for t in done.turns[1 : last + 1]) <= limit
    assert after < limit + 60  # the tool's answer that left no room


def test_thoughts_that_the_template_forgets_count_in_the_total() -> None:
    """Each turn is 60 tokens of thinking and a digit, and what is read of it later is the digit."""
    thought = "<think>" + "x" * 60 + "</think>1"
    table = Table(lambda turn, read: thought, factory=Patient, max_total_tokens=300, max_turns=50, template=FORGETS)
    done = played(table)
    assert done.metrics["env/forks"] > 0
    assert sum(len(t.tokens) for t in done.turns if t.completion is not None) <= 300
    assert done.cut


def test_conversation_ends_where_the_context_is_full() -> None:
    table = Table(lambda turn, read: call("add", a=1, b=1), functions=(add,), context=700, max_turns=50)
    done = played(table)
    assert done.cut
    assert all(len(r.tokens) + r.sampling.max_tokens <= 700 for r in table.requests[1:])


# ---- environments ----------------------------------------------------------------------------------------------------


class Counting:
    """Of our protocol: asks for the next number, three times."""

    made: list[Counting]

    def __init__(self) -> None:
        self.closed = 0
        self.tasks: list[tuple[dict[str, Any], int]] = []
        self.asked = 0
        Counting.made.append(self)

    async def reset(self, task: Mapping[str, Any], *, seed: int) -> Observation:
        self.asked = 0
        self.tasks.append((dict(task), seed))
        await anyio.sleep(2)
        return Observation(messages=({"role": "user", "content": "count"},), info={"level": 4, "map": "abc"})

    async def step(self, message: Mapping[str, Any]) -> Observation:
        await anyio.sleep(3)
        self.asked += 1
        right = message["content"] == str(self.asked)
        again = ({"role": "user", "content": f"after {self.asked}?"},)
        return Observation(messages=again, reward=float(right), done=self.asked == 3)

    async def close(self) -> None:
        self.closed += 1


class Patient(Counting):
    """Asks for ever."""

    async def step(self, message: Mapping[str, Any]) -> Observation:
        return Observation(messages=({"role": "user", "content": "and?"},))


@pytest.fixture(autouse=True)
def _fresh() -> None:
    Counting.made = []


def test_environment_is_told_the_task_and_answers_turn_by_turn() -> None:
    table = Table(lambda turn, read: "1" if turn == 0 else "7" if turn == 1 else "3", factory=Counting)
    done = played(table, prompt=task(start=9))
    (columns, seed) = Counting.made[1].tasks[0]
    assert columns == {"start": 9}
    assert [m["content"] for m in done.messages] == ["1", "after 1?", "7", "after 2?", "3", "after 3?"]
    assert [(s.turn, s.score) for s in done.step_scores] == [(1, 1.0), (3, 0.0), (5, 1.0)]
    assert done.rewards == {"Counting": 2.0}
    assert done.agent_rewards == {}
    assert (done.metrics["env/level"], done.extra) == (4.0, {"map": "abc"})
    assert done.environment is Counting.made[1]
    assert "go<|end|>\n<|user|>count" in table.tokenizer.decode(done.turns[0].tokens)
    other = played(Table(lambda turn, read: "1", factory=Counting), key="8/3", seed=99, prompt=task())
    assert Counting.made[-1].tasks[0][1] == seed  # of the prompt, not of the episode
    assert other.rewards == {"Counting": 1.0}


def test_environment_that_changes_its_task_changes_it_for_no_other_episode() -> None:
    class Popping(Counting):
        async def reset(self, task: Mapping[str, Any], *, seed: int) -> Observation:
            return Observation(info={"card": task["deck"].pop()}, done=True)

    dealt = task(deck=[1, 2, 3])
    done = [played(Table(lambda turn, read: "1", factory=Popping), key=f"3/{at}", prompt=dealt) for at in range(3)]
    assert [episode.metrics["env/card"] for episode in done] == [3.0] * 3
    assert dealt.fields == {"deck": [1, 2, 3]}


def test_episode_cut_before_any_reward_earned_nothing_rather_than_no_reward() -> None:
    done = played(Table(lambda turn, read: "one and two and three and so on", factory=Counting, max_tokens=10))
    assert done.cut
    assert done.rewards == {"Counting": 0.0}
    assert done.step_scores == ()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"reward": float("nan")}, "Odd.step gave the reward nan; it must be finite"),
        ({"reward": "high"}, "Odd.step gave the reward 'high'; it must be a number"),
        ({"messages": ("hello",)}, "each must have a role"),
    ],
)
def test_environment_that_says_nonsense_costs_the_episode_by_name(given: dict[str, Any], message: str) -> None:
    class Odd(Counting):
        async def step(self, message: Mapping[str, Any]) -> Observation:
            return Observation(**given)

    with pytest.raises(RolloutError, match=message):
        played(Table(lambda turn, read: "1", factory=Odd))


def test_message_of_an_environment_is_kept_as_plain_data() -> None:
    class Rich(Counting):
        async def step(self, message: Mapping[str, Any]) -> Observation:
            told = ({"role": "user", "content": Path("/there")},)
            return Observation(
                messages=told, reward=np.float32(0.5), done=True, info={"n": np.int64(3), "at": Path("/x")}
            )  # type: ignore[arg-type]

    done = played(Table(lambda turn, read: "1", factory=Rich))
    assert done.messages[-1] == {"role": "user", "content": "/there"}
    assert (done.metrics["env/n"], done.extra["at"]) == (3.0, "/x")
    assert serialization.decode(serialization.encode(done.extra), dict) == done.extra
    assert [type(step.score) for step in done.step_scores] == [float]


def test_instances_are_used_again_and_closed_once() -> None:
    table = Table(lambda turn, read: str(turn + 1), factory=Counting)

    async def main() -> None:
        for key in ("1/0", "1/1"):
            done = await table.play(key=key)
            assert done.release is not None
            await done.release()
        await table.pool.close()

    run_virtual(main)
    assert [len(made.tasks) for made in Counting.made[1:]] == [2]
    assert Counting.made[1].closed == 1


@pytest.mark.parametrize("shown", [True, False])
def test_no_more_instances_are_alive_than_may_play_where_no_reward_function_looks_at_them(shown: bool) -> None:
    """Six episodes, two places, nothing released; the first of them fails, and takes a second to close."""

    class Slow(Counting):
        async def reset(self, task: Mapping[str, Any], *, seed: int) -> Observation:
            self.broken = len(Counting.made) == 2  # the first but for the one that was looked at
            return await super().reset(task, seed=seed)

        async def step(self, message: Mapping[str, Any]) -> Observation:
            if self.broken:
                raise KeyError("broken")
            return await super().step(message)

        async def close(self) -> None:
            await anyio.sleep(1)
            await super().close()

    table = Table(lambda turn, read: str(turn + 1), factory=Slow, limit=2, shown=shown)
    alive: list[int] = []

    async def one(at: int) -> None:
        with suppress(KeyError):
            done = await table.play(key=f"3/{at}")
            assert (done.environment is None, done.release is None) == (not shown, not shown)

    async def main() -> None:
        async with anyio.create_task_group() as watching:
            async with anyio.create_task_group() as tasks:
                for at in range(6):
                    tasks.start_soon(one, at)
                watching.start_soon(watch)
            watching.cancel_scope.cancel()

    async def watch() -> None:
        while True:
            alive.append(len(Counting.made) - 1 - sum(made.closed for made in Counting.made))
            await anyio.sleep(0.25)

    run_virtual(main)
    assert (max(alive) > 2) == shown
    assert max(alive) >= 2


def test_no_more_instances_play_at_once_than_there_may_be() -> None:
    table = Table(lambda turn, read: str(turn + 1), factory=Counting, limit=2, decode_s=1.0)
    done: list[PlayedEpisode] = []

    async def one(at: int) -> None:
        done.append(await table.play(key=f"1/{at}"))

    async def main() -> float:
        async with anyio.create_task_group() as tasks:
            for at in range(6):
                tasks.start_soon(one, at)
        elapsed_s = anyio.current_time()
        for each in done:
            assert each.release is not None
            await each.release()
        await table.pool.close()
        return elapsed_s

    assert run_virtual(main) == pytest.approx(3 * (2 + 3 * (1 + 3)))
    assert all(made.closed == 1 for made in Counting.made[1:])


@pytest.mark.parametrize("how", ["raises", "cancelled", "engine"])
def test_instance_of_an_episode_that_failed_is_closed_and_not_used_again(how: str) -> None:
    class Failing(Counting):
        async def step(self, message: Mapping[str, Any]) -> Observation:
            if how == "raises":
                raise ValueError("broken")
            return await super().step(message)

    def script(turn: int, read: str) -> str:
        if how == "engine" and turn == 1:
            raise GenerationError("no")
        return "1"

    table = Table(script, factory=Failing)

    async def main() -> None:
        kind = {"raises": ValueError, "engine": GenerationError, "cancelled": TimeoutError}[how]
        with pytest.raises(kind), anyio.fail_after(5 if how == "cancelled" else 1000):
            await table.play()
        assert Counting.made[1].closed == 1
        await table.pool.close()

    run_virtual(main)
    assert Counting.made[1].closed == 1
    assert table.pool.made == table.pool.closed == 1


def test_late_environment_costs_the_episode_and_one_that_does_not_close_is_left() -> None:
    class Stuck(Counting):
        async def step(self, message: Mapping[str, Any]) -> Observation:
            await anyio.sleep_forever()
            raise AssertionError

        async def close(self) -> None:
            await anyio.sleep_forever()

    table = Table(lambda turn, read: "1", factory=Stuck, deadline_s=7.0)

    async def main() -> float:
        with pytest.raises(RolloutError, match=r"Stuck.step: no answer within env.deadline_s = 7 s"):
            await table.play()
        return anyio.current_time()

    assert run_virtual(main) == pytest.approx(2 + 1 + 7 + 5)
    assert table.events == ["Stuck could not be closed: RolloutError: Stuck.close: not done within 5 s"]


class Shop:
    """Of TRL's shape."""

    def __init__(self) -> None:
        self.bought: list[str] = []
        self.columns: dict[str, Any] = {}

    def reset(self, **columns: Any) -> str:
        self.bought, self.columns = [], columns
        return " There is tea."

    def buy(self, what: str) -> str:
        """Buys.

        Args:
            what: of what there is
        """
        if what == "coffee":
            raise ValueError("sold out")
        self.bought.append(what)
        return f"bought {what}"

    async def look(self) -> str:
        """Looks around."""
        await anyio.sleep(2)
        return ", ".join(self.bought)

    def get_reward(self) -> float:
        return float(len(self.bought))

    def _secret(self) -> None:
        """Not a tool."""


def test_class_of_trl_s_shape_extends_the_prompt_offers_its_methods_and_says_what_was_earned() -> None:
    def script(turn: int, read: str) -> str:
        return call("buy", what="tea") + call("buy", what="coffee") + call("look") if turn == 0 else "bye"

    table = Table(script, factory=Shop)
    done = played(table, prompt=task("Shop!", budget=3))
    assert "<|user|>Shop! There is tea.<|end|>" in table.tokenizer.decode(done.turns[0].tokens)
    assert '"buy"' in table.tokenizer.decode(done.turns[0].tokens)
    assert "secret" not in table.tokenizer.decode(done.turns[0].tokens)
    assert [m["content"] for m in done.messages if m["role"] == "tool"] == [
        "bought tea",
        "{'error': 'ValueError: sold out'}",
        "tea",
    ]
    assert done.opening == table.tokenizer.decode(done.turns[0].tokens)
    assert done.rewards == {"Shop": 1.0}
    assert done.environment.columns == {"budget": 3}


def test_conversation_keeps_the_contract_of_an_env() -> None:
    table = Table(lambda turn, read: "1", factory=Counting)
    run_virtual(check_env, lambda: table.env, task())


def test_several_agents_each_read_their_own_side() -> None:
    class Talk:
        async def reset(self, task: Mapping[str, Any], *, seed: int) -> Observation:
            return Observation(messages=({"role": "user", "content": "you are x"},), agent="x")

        async def step(self, message: Mapping[str, Any]) -> Observation:
            if message["name"] == "x":
                return Observation(
                    messages=({"role": "user", "content": f"you are o, x says {message['content']}"},), agent="o"
                )
            return Observation(done=True, rewards={"x": -1.0, "o": 1.0})

        async def close(self) -> None: ...

    table = Table(lambda turn, read: f"turn {turn}", factory=Talk)
    done = played(table)
    assert [(t.speaker, t.parent) for t in done.turns] == [("user", None), ("x", 0), ("user", -1), ("o", 2)]
    assert "you are x" not in table.tokenizer.decode(table.requests[1].tokens)
    assert done.agent_rewards == {"x": -1.0, "o": 1.0}
    assert done.rewards == {}


def test_game_of_several_that_is_cut_earned_each_of_them_nothing() -> None:
    class Talk(Counting):
        async def reset(self, task: Mapping[str, Any], *, seed: int) -> Observation:
            return Observation(messages=({"role": "user", "content": "x"},), agent="x")

        async def step(self, message: Mapping[str, Any]) -> Observation:
            rewards = {"x": 2.0} if message["name"] == "x" else {}
            return Observation(messages=({"role": "user", "content": "o"},), agent="o", rewards=rewards)

    done = played(Table(lambda turn, read: "1" if not turn else "one and two and so on", factory=Talk, max_tokens=10))
    assert done.cut
    assert done.agent_rewards == {"x": 2.0, "o": 0.0}


def test_environment_is_chosen_by_a_column_where_there_are_several() -> None:
    first, second = Table(lambda turn, read: "1", factory=Counting), Table(lambda turn, read: "bye", factory=Shop)
    settings = {"count": first.env.setups[""], "shop": second.env.setups[""]}
    env = Conversation(settings, sampling=Sampling(), rules=Tools(), context=4096)

    async def main() -> list[Any]:
        out = []
        for name, table in (("count", first), ("shop", second)):
            done = await env.play(task(environment=name, extra=1), table.generate, key="1/0", group="1", seed=0)
            out.append(done.environment)
        with pytest.raises(RolloutError, match="'garden'; it must be one of 'count', 'shop'"):
            await env.play(task(environment="garden"), first.generate, key="1/0", group="1", seed=0)
        return out

    counting, shop = run_virtual(main)
    assert isinstance(counting, Counting)
    assert shop.columns == {"extra": 1}
