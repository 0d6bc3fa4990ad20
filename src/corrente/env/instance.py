"""What an episode is played on: one instance of an environment, whatever its shape, behind one face.

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

from corrente.common.serialization import to_plain
from corrente.env.base import finite
from corrente.env.calls import ToolCall
from corrente.env.environment import Observation
from corrente.env.tools import Offload, Toolbox, run, within
from corrente.errors import ConfigError, RolloutError

NOT_TOOLS = ("reset", "get_reward", "close")

DONE = Observation(done=True)
CLOSE_S = 5.0
"""An instance that takes longer to close is left to itself: a run that ends is not to wait for it."""


class EnvInstance:
    """``environment`` None: nothing but ``functions``. ConfigError for an object that is no environment."""

    def __init__(
        self, environment: Any, *, functions: Sequence[Callable[..., Any]], offload: Offload, deadline_s: float
    ) -> None:
        self.shown = environment
        """What reward functions are given."""
        self.name = type(environment).__name__
        """Of the reward it gives."""
        self.place: object = None
        """Its place in the pool while it is in play."""
        self._offload, self._deadline_s = offload, deadline_s
        self._protocol = environment is not None and of_protocol(environment)
        self.extends_prompt = environment is not None and not self._protocol
        """Whether what ``reset`` says belongs to the prompt's last message."""
        self._own = Toolbox(methods(environment), offload=offload, deadline_s=deadline_s)
        if functions and (why := getattr(environment, "without_tools", "")):
            raise ConfigError(f"env.functions: {self.name} is played without tools: {why}")
        free = (*functions, *(getattr(environment, "tools", ()) if self._protocol else ()))
        self._free = Toolbox(free, offload=offload, deadline_s=deadline_s)
        if twice := set(self._own.names) & set(self._free.names):
            raise ConfigError(
                f"env.functions: {sorted(twice)[0]!r} is also a method of {self.name}; rename one of them"
            )

    @property
    def judges(self) -> bool:
        """Its steps may give rewards."""
        return self._protocol

    @property
    def functions(self) -> tuple[Callable[..., Any], ...]:
        """All that the policy may call."""
        return (*self._free.functions, *self._own.functions)

    async def reset(self, task: Mapping[str, Any], *, seed: int) -> Observation:
        """Begin an episode."""
        if self.shown is None:
            return Observation()
        if self._protocol:
            return _observation(await self._do("reset", task=task, seed=seed), f"{self.name}.reset")
        said = await self._do("reset", **{str(name): value for name, value in task.items()})
        return Observation() if said is None else Observation(messages=({"role": "user", "content": to_plain(said)},))

    async def step(self, message: Mapping[str, Any]) -> Observation:
        """Answer a message that calls no tool."""
        if not self._protocol:
            return DONE
        return _observation(await self._do("step", message=message), f"{self.name}.step")

    async def call(self, calls: Sequence[ToolCall]) -> tuple[list[dict[str, Any]], Counter[str]]:
        """Answer calls: functions all at once, methods of the environment one after another. See Toolbox.call."""
        answers: list[dict[str, Any]] = [{} for _ in calls]
        counts: Counter[str] = Counter()
        mine = [at for at, call in enumerate(calls) if call.name in self._own.names and not call.error]
        rest = [at for at in range(len(calls)) if at not in mine]

        async def free() -> None:
            given, counted = await self._free.call([calls[at] for at in rest], others=self._own.names)
            counts.update(counted)
            for at, answer in zip(rest, given, strict=True):
                answers[at] = answer

        async def own() -> None:
            for at in mine:
                (answers[at],), counted = await self._own.call([calls[at]])
                counts.update(counted)
                if counted["late"]:
                    raise RolloutError(f"{self.name}.{calls[at].name}: no answer within {self._allowed}")

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(free)
            tasks.start_soon(own)
        return answers, counts

    async def outcome(self) -> float | None:
        """What the environment says at the end of an episode that it earned; None where it does not say."""
        if self._protocol or not hasattr(self.shown, "get_reward"):
            return None
        said = await self._do("get_reward")
        return None if said is None else finite(said, f"{self.name}.get_reward")

    async def close(self) -> None:
        """Close the instance, if it can be."""
        if hasattr(self.shown, "close"):
            call = run(self.shown.close, {}, offload=self._offload)
            await within(CLOSE_S, call, f"{self.name}.close: not done within {CLOSE_S:g} s")

    async def _do(self, method: str, **arguments: Any) -> Any:
        call = run(getattr(self.shown, method), arguments, offload=self._offload)
        return await within(self._deadline_s, call, f"{self.name}.{method}: no answer within {self._allowed}")

    @property
    def _allowed(self) -> str:
        return f"env.deadline_s = {self._deadline_s:g} s"


def of_protocol(environment: Any) -> bool:
    """Whether it is of the Environment protocol. ConfigError when it is no environment at all."""
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


def methods(environment: Any) -> tuple[Callable[..., Any], ...]:
    """The tools of an environment of TRL's shape. Looked for on the class, so that no property is evaluated."""
    if environment is None or of_protocol(environment):
        return ()
    names = [name for name, member in inspect.getmembers(type(environment), predicate=inspect.isfunction)]
    return tuple(getattr(environment, name) for name in names if not name.startswith("_") and name not in NOT_TOOLS)


def _observation(value: Any, name: str) -> Observation:
    """What an environment said, in plain data: it is kept in checkpoints."""
    if not isinstance(value, Observation):
        raise RolloutError(f"{name} gave {type(value).__name__}; it must give an Observation")
    if not all(isinstance(message, Mapping) and "role" in message for message in value.messages):
        raise RolloutError(f"{name} gave messages {value.messages!r}; each must have a role and a content")
    return msgspec.structs.replace(
        value,
        messages=tuple({str(key): to_plain(item) for key, item in message.items()} for message in value.messages),
        reward=None if value.reward is None else finite(value.reward, name),
        rewards={str(agent): finite(reward, name) for agent, reward in value.rewards.items()},
        info={str(key): to_plain(item) for key, item in value.info.items()},
    )
