"""From a config's ``env`` section, and what a caller gives as objects, to how prompts are played."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import msgspec

from corrente.common.imports import import_callable
from corrente.common.threads import DaemonThreads
from corrente.config import Embedded, RunConfig
from corrente.config.env import Environments, EnvRules, Tools
from corrente.config.env import SingleTurn as Single
from corrente.data.types import Sampling
from corrente.env.base import Env
from corrente.env.chat_renderer import ChatRenderer, Hf
from corrente.env.conversation import Conversation, EnvSetup
from corrente.env.instance import EnvInstance
from corrente.env.pool import InstancePool, Tell
from corrente.env.single import SingleTurnEnv
from corrente.env.tools import Offload, run, schema, within
from corrente.errors import ConfigError
from corrente.models.limits import context
from corrente.prompts.base import ChatEncoder, Tool

EnvironmentFactory = Callable[[], Any] | Mapping[str, Callable[[], Any]]


@asynccontextmanager
async def open_env(
    config: RunConfig,
    *,
    tools: Sequence[Callable[..., Any]] = (),
    environment_factory: EnvironmentFactory | None = None,
    env: Env | None = None,
    chat: ChatEncoder,
    tokenizer: Hf,
    samplings: Mapping[str, Sampling],
    tell: Tell,
    shown: bool = True,
    offload: Offload | None = None,
) -> AsyncGenerator[dict[str, Env]]:
    """Yield an Env per entry of ``samplings``, which share their instances; on exit every instance is closed.

    ``tools``, ``environment_factory`` and ``env`` replace what the config names. A config of a single turn is one of tools, or of
    an environment, where those are given. ``shown``: reward functions look at what an episode was played in.
    ConfigError for tools that cannot be described and factories that make no environment.
    """
    if env is not None:
        yield dict.fromkeys(samplings, env)
        return
    rules = rules_of(config, tools=tools, environment_factory=environment_factory)
    if isinstance(rules, Single):
        yield {name: SingleTurnEnv(sampling) for name, sampling in samplings.items()}
        return
    opening = _Opening(rules, tell=tell, offload=offload or DaemonThreads(limit=rules.at_once))
    try:
        settings = await opening.settings(chat, tokenizer, tools=tools, environment_factory=environment_factory)
        embedded = isinstance(config.engine, Embedded)
        room = context(Path(config.model.path), config.engine.max_context, windowed=embedded)
        yield {
            name: Conversation(
                settings, sampling=sampling, rules=rules, context=room, seed=config.run.seed, shown=shown
            )
            for name, sampling in samplings.items()
        }
    finally:
        await opening.close()


def rules_of(
    config: RunConfig, *, tools: Sequence[Callable[..., Any]], environment_factory: EnvironmentFactory | None
) -> Single | Tools | Environments:
    """The section that holds, once the tools and the factory that were handed over are counted in."""
    section = config.env
    if environment_factory is not None and not isinstance(section, Environments):
        return Environments(**_common(section))
    if tools and isinstance(section, Single):
        return Tools()
    return section


def _common(section: Single | Tools) -> dict[str, Any]:
    return msgspec.structs.asdict(section) if isinstance(section, Tools) else {}


def _mentions(chat: ChatEncoder, tools: Sequence[Tool]) -> bool:
    """Whether a conversation reads otherwise where tools are offered."""
    asked = [{"role": "user", "content": "?"}]
    return chat.render(asked, tools=tools) != chat.render(asked, tools=())


class _Opening:
    """Settings as they are made, and their pools, to be closed."""

    def __init__(self, rules: EnvRules, *, tell: Tell, offload: Offload) -> None:
        self._rules, self._tell, self._offload = rules, tell, offload
        self._pools: list[InstancePool] = []

    async def settings(
        self,
        chat: ChatEncoder,
        tokenizer: Hf,
        *,
        tools: Sequence[Callable[..., Any]],
        environment_factory: EnvironmentFactory | None,
    ) -> dict[str, EnvSetup]:
        """By the name of the environment; "" where there is one for all."""
        rules = self._rules
        named = [import_callable(name, key="env.functions") for name in rules.functions]
        functions = tuple(tools) or tuple(named)
        out: dict[str, EnvSetup] = {}
        for name, factory in self._factories(environment_factory).items():
            limit = rules.instances if isinstance(rules, Environments) else 0
            pool = InstancePool(partial(self._make, factory, functions), limit=limit, tell=self._tell)
            self._pools.append(pool)
            probe = await pool.take()
            pool.rest(probe)
            await pool.give_back(probe)
            schemas = tuple(schema(function) for function in probe.functions)
            voice = ChatRenderer(chat, tokenizer, tools=schemas, calls=rules.calls)
            voice.check(kept=rules.history == "kept")
            if schemas and not _mentions(chat, schemas):
                names = ", ".join(function.__name__ for function in probe.functions)
                self._tell(
                    "warning",
                    f"the chat template does not render tools, so the policy is not told of {names}, unless a message does that; "
                    "chat.template names another template",
                )
            out[name] = EnvSetup(pool=pool, voice=voice)
        return out

    def _factories(self, factory: Any) -> dict[str, Callable[[], Any] | None]:
        if factory is None:
            if not isinstance(self._rules, Environments):
                return {"": None}
            factory = partial(import_callable(self._rules.factory, key="env.factory"), **self._rules.options)
        return dict(factory) if isinstance(factory, Mapping) else {"": factory}

    async def _make(self, factory: Callable[[], Any] | None, functions: tuple[Callable[..., Any], ...]) -> EnvInstance:
        deadline_s = self._rules.deadline_s
        made = None
        if factory is not None:
            call = run(factory, {}, offload=self._offload)
            made = await within(deadline_s, call, f"env.factory: nothing made within env.deadline_s = {deadline_s:g} s")
            if made is None:
                raise ConfigError("env.factory: it made None; it must make an environment")
        return EnvInstance(made, functions=functions, offload=self._offload, deadline_s=deadline_s)

    async def close(self) -> None:
        with anyio.CancelScope(shield=True):
            async with anyio.create_task_group() as tasks:
                for pool in self._pools:
                    tasks.start_soon(pool.close)
