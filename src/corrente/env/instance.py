"""One instance of an environment, of whatever shape, behind one interface.

protocol  an ``Environment``: its ``reset`` takes ``task`` and ``seed``, and ``step`` a message
class     the shape of TRL's environment_factory: ``reset(**columns)`` gives an observation or None, which is added to the last
          message of the prompt; every public method but ``reset``, ``get_reward`` and ``close`` is a tool; ``get_reward()``, if
          there is one, says at the end what the episode earned; an answer that calls no tool ends it
nothing   tools alone: an answer that calls none ends the episode

Plain methods run in threads, coroutines on the event loop. Methods of one instance never run side by side, in whatever way they
are called: they change its state. Each has a deadline; an instance that is late, or raises where no tool was called, is not used
again.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import anyio
import msgspec

from corrente.common.plain_data import json_plain, plain_text
from corrente.env.base import finite_reward
from corrente.env.calls import ToolCall
from corrente.env.environment import Observation
from corrente.env.tools import Offload, Toolbox, call_function, with_deadline
from corrente.errors import ConfigError, RolloutError

NOT_TOOLS = ("reset", "get_reward", "close")

EPISODE_DONE = Observation(done=True)
CLOSE_S = 5.0
"""An instance that takes longer to close is left to itself: a run that ends is not to wait for it."""


class EnvInstance:
    """An environment with its tools. ``environment`` None: ``functions`` alone. ConfigError for an object that is none."""

    def __init__(
        self, environment: Any, *, functions: Sequence[Callable[..., Any]], offload: Offload, deadline_s: float
    ) -> None:
        self.exposed = environment
        """The user's object, which reward functions are handed."""
        self.name = type(environment).__name__
        """Name of its reward."""
        self.pool_slot: object = None
        """The pool's slot that it takes up while it is in play."""
        self._offload, self._deadline_s = offload, deadline_s
        self._protocol = environment is not None and implements_environment(environment)
        self.extends_prompt = environment is not None and not self._protocol
        """True if the text of ``reset`` is appended to the prompt's last message."""
        self._own_tools = Toolbox(tool_methods(environment), offload=offload, deadline_s=deadline_s)
        if functions and (why := getattr(environment, "without_tools", "")):
            raise ConfigError(f"env.functions: {self.name} is played without tools: {why}")
        extra = (*functions, *(getattr(environment, "tools", ()) if self._protocol else ()))
        self._extra_tools = Toolbox(extra, offload=offload, deadline_s=deadline_s)
        if twice := set(self._own_tools.names) & set(self._extra_tools.names):
            raise ConfigError(
                f"env.functions: {sorted(twice)[0]!r} is also a method of {self.name}; rename one of them"
            )

    @property
    def rewards_steps(self) -> bool:
        """True if its steps may give rewards."""
        return self._protocol

    @property
    def functions(self) -> tuple[Callable[..., Any], ...]:
        """All functions that the policy may call."""
        return (*self._extra_tools.functions, *self._own_tools.functions)

    async def reset(self, task: Mapping[str, Any], *, seed: int) -> Observation:
        """Begin an episode."""
        if self.exposed is None:
            return Observation()
        if self._protocol:
            return _checked_observation(await self._call_method("reset", task=task, seed=seed), f"{self.name}.reset")
        answer = await self._call_method("reset", **{str(name): value for name, value in task.items()})
        return (
            Observation()
            if answer is None
            else Observation(messages=({"role": "user", "content": json_plain(answer)},))
        )

    async def step(self, message: Mapping[str, Any]) -> Observation:
        """Answer a message that calls no tool."""
        if not self._protocol:
            return EPISODE_DONE
        return _checked_observation(await self._call_method("step", message=message), f"{self.name}.step")

    async def call_tools(self, calls: Sequence[ToolCall]) -> tuple[list[dict[str, Any]], Counter[str]]:
        """Answer calls: functions all at once, methods of the environment one after another. See Toolbox.call_all."""
        answers: list[dict[str, Any]] = [{} for _ in calls]
        counts: Counter[str] = Counter()
        mine = [at for at, call in enumerate(calls) if call.name in self._own_tools.names and not call.error]
        rest = [at for at in range(len(calls)) if at not in mine]

        async def call_extra_tools() -> None:
            given, counted = await self._extra_tools.call_all([calls[at] for at in rest], others=self._own_tools.names)
            counts.update(counted)
            for at, answer in zip(rest, given, strict=True):
                answers[at] = answer

        async def call_own_tools() -> None:
            for at in mine:
                (answers[at],), counted = await self._own_tools.call_all([calls[at]])
                counts.update(counted)
                if counted["late"]:
                    raise RolloutError(f"{self.name}.{calls[at].name}: no answer within {self._deadline_text}")

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(call_extra_tools)
            tasks.start_soon(call_own_tools)
        return answers, counts

    async def final_reward(self) -> float | None:
        """The reward of the whole episode, from ``get_reward``; None where the environment has none."""
        if self._protocol or not hasattr(self.exposed, "get_reward"):
            return None
        answer = await self._call_method("get_reward")
        return None if answer is None else finite_reward(answer, f"{self.name}.get_reward")

    async def close(self) -> None:
        """Close the instance, if it can be."""
        if hasattr(self.exposed, "close"):
            call = call_function(self.exposed.close, {}, offload=self._offload)
            await with_deadline(CLOSE_S, call, f"{self.name}.close: not done within {CLOSE_S:g} s")

    async def _call_method(self, method: str, /, **arguments: Any) -> Any:
        call = call_function(getattr(self.exposed, method), arguments, offload=self._offload)
        return await with_deadline(
            self._deadline_s, call, f"{self.name}.{method}: no answer within {self._deadline_text}"
        )

    @property
    def _deadline_text(self) -> str:
        return f"env.deadline_s = {self._deadline_s:g} s"


def implements_environment(environment: Any) -> bool:
    """True if ``environment`` implements the Environment protocol. ConfigError when it is no environment at all."""
    reset = getattr(environment, "reset", None)
    if not callable(reset):
        raise ConfigError(
            f"env.factory: {type(environment).__name__} has no reset; an environment is of the Environment protocol, or has "
            "reset(**columns) and methods that are tools"
        )
    try:
        parameters = inspect.signature(reset).parameters
    except (TypeError, ValueError):
        return False
    return {"task", "seed"} <= set(parameters) and callable(getattr(environment, "step", None))


def tool_methods(environment: Any) -> tuple[Callable[..., Any], ...]:
    """The tools of an environment of TRL's shape. They are looked up on the class, so that no property is evaluated."""
    if environment is None or implements_environment(environment):
        return ()
    names = [name for name, member in inspect.getmembers(type(environment), predicate=inspect.isfunction)]
    return tuple(getattr(environment, name) for name in names if is_tool_name(name))


def is_tool_name(name: str) -> bool:
    """True if a method of that name is a tool, in an environment of TRL's shape."""
    return not name.startswith("_") and name not in NOT_TOOLS


def _checked_observation(value: Any, name: str) -> Observation:
    """Check an environment's answer and turn it into plain data, which checkpoints can hold."""
    if not isinstance(value, Observation):
        raise RolloutError(f"{name} gave {type(value).__name__}; it must give an Observation")
    if not all(isinstance(message, Mapping) and "role" in message for message in value.messages):
        raise RolloutError(f"{name} gave messages {value.messages!r}; each must have a role and a content")
    return msgspec.structs.replace(
        value,
        messages=tuple(
            {plain_text(str(key)): json_plain(item) for key, item in message.items()} for message in value.messages
        ),
        reward=None if value.reward is None else finite_reward(value.reward, name),
        rewards={str(agent): finite_reward(reward, name) for agent, reward in value.rewards.items()},
        info={plain_text(str(key)): json_plain(item) for key, item in value.info.items()},
    )
