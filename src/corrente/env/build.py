"""Builds the Envs of a run from the config's ``env`` section and the objects that a caller hands over."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import msgspec

from corrente.common.events import LogEvent
from corrente.common.imports import import_callable
from corrente.common.threads import DaemonThreads
from corrente.config import Embedded, RunConfig
from corrente.config.env import Environments, EnvRules, Tools
from corrente.config.env import SingleTurn as Single
from corrente.data.types import Sampling
from corrente.env.base import Env
from corrente.env.chat_renderer import ChatRenderer, HasTokenizer
from corrente.env.conversation import Conversation, EnvSetup
from corrente.env.instance import EnvInstance
from corrente.env.pool import InstancePool
from corrente.env.single import SingleTurnEnv
from corrente.env.tools import Offload, call_function, tool_schema, with_deadline
from corrente.errors import ConfigError, PipelineError, described, root_cause
from corrente.models.limits import context_tokens
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
    tokenizer: HasTokenizer,
    samplings: Mapping[str, Sampling],
    log_event: LogEvent,
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
    rules = resolve_env_rules(config, tools=tools, environment_factory=environment_factory)
    if isinstance(rules, Single):
        yield {name: SingleTurnEnv(sampling) for name, sampling in samplings.items()}
        return
    builder = _SetupBuilder(rules, log_event=log_event, offload=offload or DaemonThreads(limit=rules.at_once))
    try:
        setups = await builder.make_setups(chat, tokenizer, tools=tools, environment_factory=environment_factory)
        embedded = isinstance(config.engine, Embedded)
        room = context_tokens(Path(config.model.path), config.engine.max_context, windowed=embedded)
        yield {
            name: Conversation(setups, sampling=sampling, rules=rules, context=room, seed=config.run.seed, shown=shown)
            for name, sampling in samplings.items()
        }
    finally:
        await builder.close()


def resolve_env_rules(
    config: RunConfig, *, tools: Sequence[Callable[..., Any]], environment_factory: EnvironmentFactory | None
) -> Single | Tools | Environments:
    """The ``env`` section in force: the config's, or another kind where tools or a factory were handed over."""
    section = config.env
    if environment_factory is not None and not isinstance(section, Environments):
        return Environments(**_shared_rules(section))
    if tools and isinstance(section, Single):
        return Tools()
    return section


def _shared_rules(section: Single | Tools) -> dict[str, Any]:
    return msgspec.structs.asdict(section) if isinstance(section, Tools) else {}


def _renders_tools(chat: ChatEncoder, tools: Sequence[Tool]) -> bool:
    """True if the chat template renders a conversation differently where tools are offered."""
    asked = [{"role": "user", "content": "?"}]
    return chat.render(asked, tools=tools) != chat.render(asked, tools=())


async def _first_instance(pool: InstancePool) -> EnvInstance:
    """An instance of the pool. ConfigError, with the reason, where none can be made."""
    try:
        return await pool.acquire()
    except (ConfigError, PipelineError):
        raise
    except Exception as error:  # of the user's code
        raise ConfigError(f"env.factory: no environment can be made: {described(root_cause(error))}") from error


class _SetupBuilder:
    """Makes one EnvSetup per environment, and closes their pools at the end."""

    def __init__(self, rules: EnvRules, *, log_event: LogEvent, offload: Offload) -> None:
        self._rules, self._log_event, self._offload = rules, log_event, offload
        self._pools: list[InstancePool] = []

    async def make_setups(
        self,
        chat: ChatEncoder,
        tokenizer: HasTokenizer,
        *,
        tools: Sequence[Callable[..., Any]],
        environment_factory: EnvironmentFactory | None,
    ) -> dict[str, EnvSetup]:
        """Make the setups, by the name of their environment; "" where there is one for all prompts."""
        rules = self._rules
        named = [import_callable(name, key="env.functions") for name in rules.functions]
        functions = tuple(tools) or tuple(named)
        out: dict[str, EnvSetup] = {}
        for name, factory in self._factories(environment_factory).items():
            limit = rules.instances if isinstance(rules, Environments) else 0
            pool = InstancePool(
                partial(self._make_instance, factory, functions), limit=limit, log_event=self._log_event
            )
            self._pools.append(pool)
            probe = await _first_instance(pool)
            pool.end_episode(probe)
            await pool.release(probe)
            schemas = tuple(tool_schema(function) for function in probe.functions)
            renderer = ChatRenderer(chat, tokenizer, tools=schemas, calls=rules.calls)
            renderer.check_format(keep_history=rules.history == "kept")
            if schemas and not _renders_tools(chat, schemas):
                names = ", ".join(function.__name__ for function in probe.functions)
                self._log_event(
                    "warning",
                    f"the chat template does not render tools, so the policy is not told of {names}, unless a message does that; "
                    "chat.template names another template",
                )
            out[name] = EnvSetup(pool=pool, renderer=renderer)
        return out

    def _factories(self, factory: Any) -> dict[str, Callable[[], Any] | None]:
        if factory is None:
            if not isinstance(self._rules, Environments):
                return {"": None}
            factory = partial(import_callable(self._rules.factory, key="env.factory"), **self._rules.options)
        return dict(factory) if isinstance(factory, Mapping) else {"": factory}

    async def _make_instance(
        self, factory: Callable[[], Any] | None, functions: tuple[Callable[..., Any], ...]
    ) -> EnvInstance:
        deadline_s = self._rules.deadline_s
        made = None
        if factory is not None:
            call = call_function(factory, {}, offload=self._offload)
            made = await with_deadline(
                deadline_s, call, f"env.factory: nothing made within env.deadline_s = {deadline_s:g} s"
            )
            if made is None:
                raise ConfigError("env.factory: it made None; it must make an environment")
        return EnvInstance(made, functions=functions, offload=self._offload, deadline_s=deadline_s)

    async def close(self) -> None:
        with anyio.CancelScope(shield=True):
            async with anyio.create_task_group() as tasks:
                for pool in self._pools:
                    tasks.start_soon(pool.close)
