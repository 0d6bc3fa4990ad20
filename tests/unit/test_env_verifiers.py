"""Tasks of the real verifiers package through our protocol. Skipped where it is not installed."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import anyio
import pytest
from tests.unit.endpoint import endpoint

from corrente.common.threads import DaemonThreads, call_inline
from corrente.env.adapters.verifiers import Verifiers
from corrente.env.environment import Observation
from corrente.env.instance import EnvInstance
from corrente.errors import ConfigError, RolloutError

pytestmark = pytest.mark.slow

vf: Any = pytest.importorskip("verifiers.v1", reason="pip install verifiers", exc_type=ImportError)

OPTIONS = {"taskset": f"{__name__}:Letters"}
HERE = Path(__file__)


class Letter(vf.TaskData):
    answer: str


class Seen(vf.State):
    begun: int = 0


class Say(vf.Task[Letter, Seen, vf.TaskConfig]):
    """Say the letter."""

    async def setup(self, trace: Any) -> None:
        trace.state.begun += 1

    async def finalize(self, trace: Any) -> None:
        trace.info["said"] = [message.content for message in trace.assistant_messages]

    @vf.reward(weight=2.0)
    async def right(self, trace: Any) -> float:
        assert trace.state.begun == 1
        return float(trace.last_reply == self.data.answer)

    @vf.reward(weight=0.5)
    async def style(self, task: Any, trace: Any, runtime: Any = None) -> dict[str, float]:
        assert runtime is None
        return {"short": float(len(trace.last_reply) < 4), "asked": float(task.answer in task.prompt_text)}

    @vf.metric
    async def length(self, trace: Any) -> float:
        return len(trace.last_reply)

    @vf.metric
    async def roles(self, trace: Any) -> dict[str, float]:
        roles = [message.role for message in trace.messages]
        return {"turns": trace.num_turns, "system_first": roles[0] == "system", "messages": len(roles)}


class LettersConfig(vf.TasksetConfig):
    letters: str = "abcd"


class Letters(vf.Taskset[Say, LettersConfig]):
    loads = 0

    def load(self) -> Iterable[Any]:
        type(self).loads += 1
        for letter in self.config.letters:
            data = Letter(prompt=f"Say {letter}", answer=letter, name=f"the {letter}", system_prompt="Be brief.")
            yield Say(data, self.config.task)


def _texts(seen: Observation) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in seen.messages]


def _play(environment: Any, said: str, *, seed: int = 0, **columns: Any) -> tuple[Observation, Observation]:
    async def main() -> tuple[Observation, Observation]:
        first = await environment.reset(columns, seed=seed)
        return first, await environment.step({"role": "assistant", "content": said})

    return anyio.run(main)


def test_verifiers_task_is_read_answered_and_scored_by_its_weights():
    first, end = _play(Verifiers(**OPTIONS), "b", seed=5)
    assert _texts(first) == [("system", "Be brief."), ("user", "Say b")]
    assert (first.done, first.reward) == (False, None)
    assert (end.done, end.reward) == (True, 2.0 * 1 + 0.5 * (1 + 1))
    assert end.info == {
        "task": "1 (the b)",
        "rewards/right": 1.0,
        "rewards/short": 1.0,
        "rewards/asked": 1.0,
        "metrics/length": 1.0,
        "metrics/turns": 1.0,
        "metrics/system_first": 1.0,
        "metrics/messages": 3.0,
        "info": {"said": ["b"]},
    }


def test_verifiers_wrong_answer_earns_what_is_left():
    assert _play(Verifiers(**OPTIONS), "bbbbbb", seed=1)[1].reward == 0.5


def test_verifiers_score_is_that_of_the_task_itself():
    """What verifiers makes of the same words, without any of ours."""
    task = next(iter(Letters(LettersConfig()).include(idx=[2])))
    trace = vf.Trace(
        task=vf.TraceTask(type="Say", data=task.data), agent=vf.AgentInfo(config=vf.AgentConfig()), state=Seen(begun=1)
    )
    said = [
        vf.SystemMessage(content="Be brief."),
        vf.UserMessage(content="Say c"),
        vf.AssistantMessage(content="ccccc"),
    ]
    for at, message in enumerate(said):
        trace.nodes.append(vf.MessageNode(parent=at - 1 if at else None, message=message, sampled=at == 2))
    anyio.run(task.score, trace)
    _, end = _play(Verifiers(**OPTIONS), "ccccc", seed=2)
    assert end.reward == trace.reward
    assert {name: reward.score for name, reward in trace.rewards.items()} == {
        name.removeprefix("rewards/"): value for name, value in end.info.items() if name.startswith("rewards/")
    }


def test_verifiers_instances_play_the_task_of_the_seed_and_load_once():
    Letters.loads = 0
    options = {**OPTIONS, "config": {"letters": "efgh"}}
    several = [Verifiers(**options) for _ in range(3)]
    assert Letters.loads == 1
    for seed in range(8):
        assert {_texts(_play(one, "", seed=seed)[0])[-1] for one in several} == {("user", f"Say {'efgh'[seed % 4]}")}


def test_verifiers_column_names_the_task():
    one = Verifiers(**OPTIONS, column="task")
    assert _texts(_play(one, "", task=3)[0])[-1] == ("user", "Say d")
    assert _texts(_play(one, "", task="the c")[0])[-1] == ("user", "Say c")
    with pytest.raises(RolloutError, match=r"'task' is 4; no task"):
        _play(one, "", task=4)
    with pytest.raises(RolloutError, match="the prompt has number"):
        _play(one, "", number=4)


def test_verifiers_selection_keeps_the_numbers_of_tasks():
    some = Verifiers(**OPTIONS, select={"include": {"idx": ["2:"]}, "limit": 1}, column="task")
    assert _texts(_play(some, "", task=2)[0])[-1] == ("user", "Say c")
    with pytest.raises(RolloutError, match="no task"):
        _play(some, "", task=0)


def test_verifiers_taskset_is_given_as_an_object():
    _, end = _play(Verifiers(Letters(LettersConfig(letters="q"))), "q", seed=9)
    assert end.info["rewards/right"] == 1.0
    with pytest.raises(ConfigError, match="leave this out"):
        Verifiers(Letters(LettersConfig()), config={"letters": "z"})


def test_verifiers_thinking_is_no_part_of_the_answer():
    thought = "<think>\nMaybe d?\n</think>\n\na"
    assert _play(Verifiers(**OPTIONS), thought)[1].info["rewards/right"] == 1.0
    assert _play(Verifiers(**OPTIONS, thinking=""), thought)[1].info["rewards/right"] == 0.0


def test_verifiers_rewards_plugged_by_the_config_are_scored():
    task = {"rewards": {"loud": {"fn": f"{HERE}:loud", "weight": 4.0}, "right": {"weight": 1.0}}}
    _, end = _play(Verifiers(**OPTIONS, config={"task": task}), "A")
    assert (end.info["rewards/loud"], end.reward) == (1.0, 4.0 + 0.5 * (1 + 1))


def test_verifiers_judge_plugged_by_the_config_is_asked(monkeypatch: pytest.MonkeyPatch):
    """The package's own judge, over HTTP, with an endpoint on loopback."""
    monkeypatch.setenv("LETTERS_KEY", "k")
    with endpoint((200, _said("yes"))) as (url, asked):
        judge = {"id": "reference", "base_url": url, "api_key_var": "LETTERS_KEY", "model": "judge", "weight": 3.0}
        _, end = _play(Verifiers(**OPTIONS, config={"task": {"judges": [judge]}}), "za")
    assert (end.info["rewards/reference"], end.reward) == (1.0, 3.0 + 0.5 * (1 + 1))
    assert "Say a" in asked[0]["messages"][0]["content"]
    assert end.info["info"]["judge_calls"][0]["response"]["message"]["content"] == "yes"


async def loud(trace: Any) -> float:
    return float(trace.last_reply.isupper())


# ---- tasks of other kinds ---------------------------------------------------------------------------------------------------


class Plain(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def one(self, trace: Any) -> float:
        return 1.0


def _of(*data: Any, task: type = Plain, infinite: bool = False) -> Any:
    """A taskset of these rows."""

    class Rows(vf.Taskset[task, vf.TasksetConfig]):  # type: ignore[valid-type]
        INFINITE = infinite

        def load(self) -> Iterable[Any]:
            return [task(row, self.config.task) for row in data]

    return Rows(vf.TasksetConfig())


def test_verifiers_prompt_of_messages_is_read_as_it_is():
    prompt = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        {"role": "assistant", "content": "yes", "reasoning_content": "hm"},
        {"role": "user", "content": "three"},
    ]
    first, end = _play(Verifiers(_of(vf.TaskData(prompt=prompt))), "x")
    assert _texts(first) == [("system", "s"), ("user", "one\ntwo"), ("assistant", "yes"), ("user", "three")]
    assert first.messages[2]["reasoning_content"] == "hm"
    assert (end.reward, end.info["task"]) == (1.0, "0")


class Sum(Plain):
    @vf.reward(weight=2.0)
    async def equal(self, trace: Any) -> float:
        return vf.verify_boxed_math_answer(trace.last_reply, r"\boxed{1/2}")


def test_verifiers_mathematical_answers_are_compared_although_that_sets_signals():
    """On the event loop of the main thread; in a thread the package would score 0 without a word."""
    environment = Verifiers(_of(vf.TaskData(prompt="p"), task=Sum))

    async def main() -> Observation:
        instance = EnvInstance(environment, functions=(), offload=DaemonThreads(limit=1), deadline_s=30.0)
        await instance.reset({}, seed=0)
        return await instance.step({"role": "assistant", "content": r"It is \boxed{0.5}"})

    assert anyio.run(main).reward == 3.0


class Counting(Plain):
    @vf.reward
    async def tokens(self, trace: Any) -> float:
        return trace.num_output_tokens


class Failing(Plain):
    @vf.reward
    async def broken(self, trace: Any) -> float:
        raise KeyError("rubric")


@pytest.mark.parametrize(("task", "message"), [(Counting, "how many tokens"), (Failing, "KeyError: 'rubric'")])
def test_verifiers_reward_that_cannot_be_told_costs_the_episode(task: type, message: str):
    with pytest.raises(vf.TaskError, match=message):
        _play(Verifiers(_of(vf.TaskData(prompt="p"), task=task)), "x")


# ---- refusals ---------------------------------------------------------------------------------------------------------------


class Boxed(Plain):
    NEEDS_CONTAINER = True


class Prepared(Plain):
    async def setup(self, trace: Any, runtime: Any) -> None:
        await runtime.write("x", b"")


class Collected(Plain):
    async def finalize(self, trace: Any, runtime: Any) -> None:
        trace.info["x"] = await runtime.read("x")


class Keyed(Plain):
    def runtime_env(self) -> dict[str, str]:
        return {"KEY": "1"}


class Checked(Plain):
    @vf.reward
    async def tests(self, trace: Any, runtime: Any) -> float:
        return 1.0


class Measured(Plain):
    @vf.metric
    async def files(self, trace: Any, runtime: Any) -> float:
        return 1.0


class Watched(Plain):
    @vf.stop
    async def enough(self, trace: vf.Trace) -> bool:
        return True


class Rewritten(Plain):
    @vf.intercept
    async def censor(self, response: vf.Response) -> None:
        return None


class Unpaid(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    pass


class Search(vf.Toolset[vf.ToolsetConfig, vf.State]):
    @vf.tool
    async def search(self, query: str) -> str:
        return query


class Searching(Plain):
    @classmethod
    def toolsets(cls, config: Any) -> list[Any]:
        return [Search(vf.ToolsetConfig())]


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (Boxed, "Boxed.NEEDS_CONTAINER, and there is no runtime here"),
        (Prepared, "Prepared.setup takes a runtime"),
        (Collected, "Collected.finalize takes a runtime"),
        (Keyed, "Keyed.runtime_env is for a runtime"),
        (Checked, "the reward 'tests' takes a runtime.*leave it out of the score"),
        (Measured, "the metric 'files' takes a runtime"),
        (Watched, "enough stops conversations between turns"),
        (Rewritten, "censor intercepts what is read or said"),
        (Searching, r"Searching has tools \(Search\), which servers of verifiers answer"),
        (Unpaid, "Unpaid has no reward and no judge"),
    ],
)
def test_verifiers_tasks_that_need_more_than_an_answer_are_refused(task: type, message: str):
    with pytest.raises(ConfigError, match=f"Rows, task 0: {message}"):
        Verifiers(_of(vf.TaskData(prompt="p"), task=task))


IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]
CALL = [
    {"role": "assistant", "tool_calls": [{"id": "1", "name": "f", "arguments": "{}"}]},
    {"role": "tool", "tool_call_id": "1", "content": "x"},
]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"prompt": None}, "no prompt, so a user is to open the conversation"),
        ({"prompt": "p", "image": "debian"}, "image = 'debian', and there is no runtime"),
        ({"prompt": "p", "workdir": "/x"}, "workdir = '/x'"),
        ({"prompt": IMAGE}, "its prompt has images"),
        ({"prompt": CALL}, "calls of tools"),
        ({"prompt": [{"role": "assistant", "content": "I say"}]}, "ends with a message of the assistant"),
    ],
)
def test_verifiers_data_that_cannot_be_played_is_refused_wherever_it_stands(data: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=f"task 1: .*{message}"):
        Verifiers(_of(vf.TaskData(prompt="p"), vf.TaskData(**data)))


def test_verifiers_tools_of_a_taskset_and_tasks_without_end_are_refused():
    rows = _of(vf.TaskData(prompt="p"))
    type(rows).toolsets = classmethod(lambda cls, config: [Search(vf.ToolsetConfig())])
    with pytest.raises(ConfigError, match=r"has tools \(Search\)"):
        Verifiers(rows)
    with pytest.raises(ConfigError, match=r"env\.options\.select\.limit"):
        Verifiers(_of(vf.TaskData(prompt="p"), infinite=True))
    assert _play(Verifiers(_of(vf.TaskData(prompt="p"), infinite=True), select={"limit": 1}), "x")[1].reward == 1.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"taskset": "no-such-taskset"}, "env.options.taskset = 'no-such-taskset': ModuleNotFoundError"),
        ({"taskset": f"{__name__}:Say"}, "it is no class of Taskset"),
        ({"taskset": 3}, "it must be a name, or a Taskset"),
        ({**OPTIONS, "config": {"leters": "ab"}}, r"env\.options\.config of .*leters: Extra inputs"),
        ({**OPTIONS, "config": {"letters": ""}}, r"env\.options\.select leaves no task of Letters"),
        ({**OPTIONS, "select": {"limit": 0}}, r"env\.options\.select: .*limit"),
        ({**OPTIONS, "config": {"task": {"judges": [{"id": "no-such-judge"}]}}}, "no-such-judge"),
    ],
)
def test_verifiers_options_that_name_nothing_are_refused(options: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        Verifiers(**options)


INSTALLED = """
import verifiers.v1 as vf
class One(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def one(self, trace):
        return 1.0
class Ones(vf.Taskset[One, vf.TasksetConfig]):
    def load(self):
        return [One(vf.TaskData(prompt=self.config.id), self.config.task)]
__all__ = ["Ones"]
"""
BRINGS = """
class Both(vf.Env[vf.EnvConfig]):
    async def run(self, task, agents):
        pass
__all__.append("Both")
"""


def test_verifiers_installed_taskset_is_named_by_its_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "ones_alone.py").write_text(INSTALLED)
    monkeypatch.syspath_prepend(tmp_path)
    first, end = _play(Verifiers("someone/ones-alone@0.1"), "x")
    assert (_texts(first), end.reward) == ([("user", "someone/ones-alone@0.1")], 1.0)


def test_verifiers_taskset_that_brings_its_own_environment_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "ones_and_both.py").write_text(INSTALLED + BRINGS)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="its package brings Both to play its tasks"):
        Verifiers("ones-and-both")


def test_verifiers_is_played_without_tools_of_the_run():
    with pytest.raises(ConfigError, match=r"env\.functions: Verifiers is played without tools"):
        EnvInstance(Verifiers(**OPTIONS), functions=(loud,), offload=call_inline, deadline_s=5.0)


def _said(answer: str) -> dict[str, Any]:
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": answer}}
    return {"id": "1", "object": "chat.completion", "created": 0, "model": "judge", "choices": [choice]}
