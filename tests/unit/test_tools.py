"""Tools in threads and on the loop, and how environments are opened: what hangs is left behind, what cannot be is refused."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import anyio
import msgspec
import pytest
from tests.unit.chat_tokenizers import PLAIN, WITH_TOOLS, ByteTokenizer

from corrente.common.threads import DaemonThreads, call_inline, guard_user_code
from corrente.config import Chat, RunConfig
from corrente.config.env import Environments, Tools
from corrente.data.types import Sampling
from corrente.env import build, checks
from corrente.env.calls import ToolCall
from corrente.env.conversation import Conversation
from corrente.env.environment import Observation
from corrente.env.instance import EnvInstance
from corrente.env.single import SingleTurnEnv
from corrente.env.tools import Toolbox, tool_schema
from corrente.errors import ConfigError, RolloutError
from corrente.prompts.chat import ChatTemplate


def double(number: int) -> int:
    """Doubles.

    Args:
        number: what is doubled
    """
    return 2 * number


class Room:
    """Of our protocol, in plain methods."""

    threads: ClassVar[set[int]] = set()

    def reset(self, task: Mapping[str, Any], *, seed: int) -> Observation:
        self.threads.add(threading.get_ident())
        return Observation()

    def step(self, message: Mapping[str, Any]) -> Observation:
        return Observation(done=True)

    def close(self) -> None:
        self.open = False


# ---- tools in threads ------------------------------------------------------------------------------------------------


def test_plain_functions_run_beside_one_another_and_off_the_event_loop():
    """Each waits for the other: one after the other they would not end."""
    barrier = threading.Barrier(3, timeout=20)
    loop = threading.get_ident()

    def meet() -> bool:
        """Meets."""
        barrier.wait()
        return threading.get_ident() != loop

    async def main():
        box = Toolbox([meet], offload=DaemonThreads(limit=3), deadline_s=30.0)
        return await box.call_all([ToolCall(name="meet")] * 3)

    answers, counts = anyio.run(main)
    assert [answer["content"] for answer in answers] == ["True"] * 3
    assert counts == {"calls": 3}


def test_tool_that_never_returns_is_answered_for_and_others_go_on():
    never = threading.Event()

    def hang() -> None:
        """Hangs."""
        never.wait()

    async def main():
        box = Toolbox([hang, double], offload=DaemonThreads(limit=2), deadline_s=0.05)
        return await box.call_all([ToolCall(name="hang"), ToolCall(name="double", arguments={"number": 4})])

    answers, counts = anyio.run(main)
    never.set()
    assert "no answer within 0.05 s" in answers[0]["content"]
    assert answers[1]["content"] == "8"
    assert counts == {"calls": 2, "failures": 1, "late": 1}


def test_tool_that_exits_costs_the_call_and_not_the_run():
    def leave() -> None:
        """Leaves."""
        sys.exit(3)

    async def main():
        return await Toolbox([leave], offload=DaemonThreads(limit=1), deadline_s=5.0).call_all([ToolCall(name="leave")])

    (answer,), counts = anyio.run(main)
    assert "SystemExit" in answer["content"]
    assert counts["raised"] == 1


@pytest.mark.parametrize(
    ("error", "name"), [(SystemExit(0), "SystemExit"), (asyncio.CancelledError(), "CancelledError")]
)
def test_coroutine_that_is_not_to_be_caught_costs_its_call_and_nothing_beside_it(error: BaseException, name: str):
    async def leave() -> None:
        """Leaves."""
        await anyio.lowlevel.checkpoint()
        raise error

    async def stay() -> str:
        """Stays."""
        await anyio.sleep(0.001)
        return "here"

    async def main():
        return await Toolbox([leave, stay], offload=call_inline, deadline_s=5.0).call_all(
            [ToolCall(name="leave"), ToolCall(name="stay")]
        )

    answers, counts = anyio.run(main)
    assert f"ended by {name}" in answers[0]["content"]
    assert answers[1]["content"] == "here"
    assert counts["raised"] == 1


def test_environment_that_exits_costs_the_episode():
    class Leaves:
        async def reset(self, task: Any, *, seed: int) -> Any:
            sys.exit(0)

        async def step(self, message: Any) -> Any: ...

    async def main() -> None:
        await EnvInstance(Leaves(), functions=(), offload=call_inline, deadline_s=5.0).reset({}, seed=1)

    with pytest.raises(RolloutError, match="ended by SystemExit"):
        anyio.run(main)


def test_cancellation_of_ours_is_passed_on():
    async def theirs() -> None:
        with guard_user_code():
            await anyio.sleep_forever()

    async def main() -> bool:
        with anyio.move_on_after(0.001) as ours:
            await theirs()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(theirs)
            await anyio.lowlevel.checkpoint()
            tasks.cancel_scope.cancel()
        return ours.cancelled_caught

    for backend in ("asyncio", "trio"):
        assert anyio.run(main, backend=backend)


@pytest.mark.slow
def test_process_ends_though_a_tool_hangs():
    code = (
        "import anyio, threading\n"
        "from corrente.env.calls import ToolCall\nfrom corrente.env.tools import Toolbox\n"
        "from corrente.common.threads import DaemonThreads\n"
        "def hang():\n    threading.Event().wait()\n"
        "async def main():\n"
        "    box = Toolbox([hang], offload=DaemonThreads(limit=1), deadline_s=0.05)\n"
        "    print((await box.call_all([ToolCall(name='hang')]))[1]['late'])\n"
        "anyio.run(main)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "1\n"


def test_plain_environment_runs_off_the_event_loop():
    async def main() -> set[int]:
        instance = EnvInstance(Room(), functions=(), offload=DaemonThreads(limit=1), deadline_s=5.0)
        await instance.reset({}, seed=1)
        assert (await instance.step({"content": ""})).done
        await instance.close()
        assert instance.exposed.open is False
        return Room.threads

    assert threading.get_ident() not in anyio.run(main)


# ---- schemas ---------------------------------------------------------------------------------------------------------


def test_schema_is_made_of_hints_and_docstring():
    function = tool_schema(double)["function"]
    assert (function["name"], function["description"]) == ("double", "Doubles.")
    assert function["parameters"]["properties"]["number"] == {"type": "integer", "description": "what is doubled"}


def test_tool_that_does_not_describe_itself_is_refused_by_name():
    def bare(x):
        return x

    with pytest.raises(ConfigError, match="the tool 'bare' cannot be described"):
        tool_schema(bare)


def test_two_tools_of_one_name_are_refused():
    with pytest.raises(ConfigError, match="two tools are called 'double'"):
        Toolbox([double, double], offload=DaemonThreads(limit=1), deadline_s=1.0)


def test_factory_without_reset_makes_no_environment():
    with pytest.raises(ConfigError, match="int has no reset"):
        EnvInstance(3, functions=(), offload=DaemonThreads(limit=1), deadline_s=1.0)


def test_environment_that_is_played_without_tools_is_refused_beside_them():
    class Deaf(Room):
        without_tools = "it would not hear of calls"

    limited = DaemonThreads(limit=1)
    EnvInstance(Deaf(), functions=(), offload=limited, deadline_s=1.0)
    with pytest.raises(ConfigError, match=r"env\.functions: Deaf is played without tools: it would not hear of calls"):
        EnvInstance(Deaf(), functions=(double,), offload=limited, deadline_s=1.0)


# ---- from config and objects -----------------------------------------------------------------------------------------


def opened(
    config: RunConfig, tmp_path: Path, template: str = WITH_TOOLS, *, told: list[str] | None = None, **given: Any
) -> dict[str, Any]:
    said = [] if told is None else told
    tokenizer = ByteTokenizer(template)
    config = msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, path=str(tmp_path)))

    async def main() -> dict[str, Any]:
        async with build.open_env(
            config,
            **given,
            chat=ChatTemplate(tokenizer, Chat()),  # type: ignore[arg-type]
            tokenizer=tokenizer,
            samplings={"train": Sampling(), "eval": Sampling(temperature=0.0)},
            log_event=lambda level, message: said.append(f"{level}: {message}"),
        ) as envs:
            return envs

    return anyio.run(main)


def test_tool_that_is_no_function_is_refused_before_anything_is_made():
    with pytest.raises(ConfigError, match=r"tools: 'double' given; each must be a function"):
        checks.check_env_settings(RunConfig(), tools=["double"])  # type: ignore[list-item]


def test_run_without_tools_plays_a_single_turn(tmp_path: Path):
    envs = opened(RunConfig(), tmp_path)
    assert all(isinstance(env, SingleTurnEnv) for env in envs.values())


@pytest.mark.parametrize(
    "given", [{"tools": [double]}, {"environment_factory": Room}, {"environment_factory": {"a": Room, "b": Room}}]
)
def test_tools_and_factories_that_are_given_make_conversations(tmp_path: Path, given: dict[str, Any]):
    envs = opened(RunConfig(), tmp_path, **given)
    assert all(isinstance(env, Conversation) for env in envs.values())
    assert envs["train"].setups is envs["eval"].setups  # they share their instances


def test_given_env_is_played_as_it_is(tmp_path: Path):
    env = SingleTurnEnv(Sampling())
    assert opened(RunConfig(), tmp_path, env=env) == {"train": env, "eval": env}


def test_instances_are_closed_when_the_run_is_over(tmp_path: Path):
    made: list[Room] = []

    def make() -> Room:
        made.append(Room())
        return made[-1]

    opened(RunConfig(), tmp_path, environment_factory=make)
    assert [room.open for room in made] == [False]


def test_tools_that_the_template_does_not_render_are_told(tmp_path: Path):
    told: list[str] = []
    opened(RunConfig(), tmp_path, told=told, tools=[double])
    assert not told
    opened(RunConfig(), tmp_path, PLAIN, told=told, tools=[double])
    assert len(told) == 1
    assert told[0].startswith("warning: the chat template does not render tools, so the policy is not told of double")


def test_kept_history_is_refused_where_the_template_does_not_show_it(tmp_path: Path):
    hides = WITH_TOOLS.replace("{{ m.content }}", "{% if m.role != 'assistant' %}{{ m.content }}{% endif %}")
    with pytest.raises(ConfigError, match=r'env\.history = "kept"'):
        opened(RunConfig(env=Tools(history="kept")), tmp_path, hides, tools=[double])


@pytest.mark.parametrize(
    ("env", "given", "message"),
    [
        (Tools(), {}, r"env\.functions = \[\]"),
        (Tools(functions=("absent.py:f",)), {}, "absent.py does not exist"),
        (Environments(), {}, r'env\.factory = ""'),
        (Environments(factory="nowhere:Room"), {}, r"env\.factory = 'nowhere:Room'"),
        (Tools(calls="(("), {"tools": [double]}, r"env\.calls"),
        (
            Tools(max_total_tokens=99),
            {"tools": [double]},
            r"env\.max_total_tokens = 99: it must be below engine\.max_context = 99",
        ),
        (Tools(), {"env": SingleTurnEnv(Sampling()), "tools": [double]}, "leave the other two out"),
        (Tools(), {"environment_factory": 3}, "environment_factory"),
        (Tools(), {"environment_factory": {"": Room}}, "environment_factory"),
    ],
)
def test_environment_that_cannot_be_played_is_refused_by_key(env: Any, given: dict[str, Any], message: str):
    config = RunConfig(env=env, engine=msgspec.structs.replace(RunConfig().engine, max_context=99))
    with pytest.raises(ConfigError, match=message):
        checks.check_env_settings(config, **given)


# ---- described at the start --------------------------------------------------------------------------------------------------


def _vague(n: int, **more: Any) -> int:
    """Count.

    Args:
        n: How far.
    """
    return n


def _untyped(n) -> int:  # type: ignore[no-untyped-def]
    """Count.

    Args:
        n: How far.
    """
    return n


def _silent(n: int) -> int:
    return n


class _Game:
    """Of TRL's shape, with a method that is no tool anybody could describe."""

    def reset(self, **columns: Any) -> None: ...

    def move(self, where) -> str:  # type: ignore[no-untyped-def]
        """Move.

        Args:
            where: Where to.
        """
        return where


@pytest.mark.parametrize("objects", [{"tools": [f]} for f in (_vague, _untyped, _silent, print)]
                         + [{"environment_factory": _Game}, {"environment_factory": {"a": _Game}}])  # fmt: skip
@pytest.mark.parametrize("config", [RunConfig(), RunConfig(env=Environments()), RunConfig(env=Tools())])
def test_tool_that_cannot_be_described_is_refused_at_the_start(objects: dict[str, Any], config: RunConfig):
    if "tools" in objects and isinstance(config.env, Environments):
        objects = {**objects, "environment_factory": lambda: None}
    with pytest.raises(ConfigError, match=r"env\.functions: the tool '\w+' cannot be described"):
        checks.check_env_settings(config, **objects)


def test_tool_that_a_config_names_is_described_at_the_start(tmp_path: Path):
    (tmp_path / "tools.py").write_text("def a(n, **more):\n    '''Say.'''\n    return n\n")
    config = RunConfig(env=Tools(functions=(f"{tmp_path}/tools.py:a",)))
    with pytest.raises(ConfigError, match="'a' cannot be described"):
        checks.check_env_settings(config)
