"""Wraps an environment so that opponents play some of its agents: a Python function, or a model behind a chat endpoint.

An opponent's messages reach the policy only through the environment, and are neither sampled nor trained; only the other agents
are. Rewards of opponents are not reported. A frozen opponent gives the policy a fixed measure, and training a fixed target.

A function is given the chat messages of its agent's view, and returns its answer. An endpoint (OpenAI-compatible: vLLM's
server, for one, with a checkpoint of the policy) is asked with the same messages, and asked again after a lost connection or a
5xx until ``env.deadline_s`` has passed. Relative paths of functions begin where the run was started.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import anyio
import httpx2 as httpx
import msgspec

from corrente.common.imports import import_callable
from corrente.common.threads import DaemonThreads
from corrente.env.environment import Observation
from corrente.env.tools import call_function
from corrente.errors import ConfigError, RolloutError

Messages = Sequence[Mapping[str, Any]]
Opponent = Callable[[Messages], Awaitable[str]]

TOKEN_VARIABLE = "CORRENTE_OPPONENT_TOKEN"
"""Environment variable with the bearer token of endpoints."""
MAX_THREADS = 64
LONGEST_WAIT_S = 5.0
SHOWN_CHARACTERS = 200


class OpponentServer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model that plays. ``url`` up to and with /v1; ``system``: a message before all others, empty for none."""

    url: str
    model: str
    system: str = ""
    temperature: float = 1.0
    max_tokens: int = 256


class Against:
    """Implements Environment. ``factory`` and ``options`` make the environment, as ``env.factory`` and ``env.options`` would;
    ``opponents``: by agent, a function by name, or the keys of an OpponentServer. ConfigError for anything else."""

    def __init__(
        self,
        *,
        factory: str,
        opponents: Mapping[str, str | Mapping[str, Any]],
        options: Mapping[str, Any] | None = None,
    ) -> None:
        if not opponents:
            raise ConfigError("env.options.opponents is empty: name an agent and who plays it, or leave Against out")
        self._threads = DaemonThreads(limit=MAX_THREADS)
        self._inner: Any = import_callable(factory, key="env.options.factory")(**(options or {}))
        self._http = httpx.AsyncClient(
            timeout=httpx.Timeout(None, connect=10.0), trust_env=False, headers=_auth_headers()
        )
        self._opponents = {agent: self._make_opponent(agent, given) for agent, given in opponents.items()}
        self._views: dict[str, list[Mapping[str, Any]]] = {}

    async def reset(self, task: Mapping[str, Any], *, seed: int) -> Observation:
        """Begin an episode, and play opponents' turns until it is the policy's."""
        self._views = {}
        return await self._play_until_policy_turn(await self._call_environment("reset", task=task, seed=seed))

    async def step(self, message: Mapping[str, Any]) -> Observation:
        """Take the policy's turn, and play opponents' turns until it is the policy's again."""
        return await self._play_until_policy_turn(await self._call_environment("step", message=message))

    async def close(self) -> None:
        """Close the environment and connections."""
        await self._http.aclose()
        await self._call_environment("close")

    async def _play_until_policy_turn(self, first: Observation) -> Observation:
        """Play opponents' turns. Rewards for their messages are left out; ``first`` answers the policy, and its rewards stay."""
        seen, rewards, info = first, dict(first.rewards), dict(first.info)
        while not seen.done and seen.agent in self._opponents:
            view = self._views.setdefault(seen.agent, [])
            view += seen.messages
            said = {"role": "assistant", "content": await self._opponents[seen.agent](view)}
            view.append(said)
            seen = await self._call_environment("step", message=said)
            for agent, reward in seen.rewards.items():
                rewards[agent] = rewards.get(agent, 0.0) + reward
            info |= seen.info
        ours = {agent: reward for agent, reward in rewards.items() if agent not in self._opponents}
        return msgspec.structs.replace(seen, reward=first.reward, rewards=ours, info=info)

    async def _call_environment(self, method: str, **arguments: Any) -> Any:
        return await call_function(getattr(self._inner, method), arguments, offload=self._threads)

    def _make_opponent(self, agent: str, given: str | Mapping[str, Any]) -> Opponent:
        if isinstance(given, str):
            function = import_callable(given, key=f"env.options.opponents.{agent}")

            async def play(messages: Messages) -> str:
                return str(await call_function(function, {"messages": list(messages)}, offload=self._threads))

            return play
        try:
            endpoint = msgspec.convert(dict(given), OpponentServer)
        except msgspec.ValidationError as error:
            raise ConfigError(f"env.options.opponents.{agent}: {error}; it has url and model") from None
        return lambda messages: self._ask_server(endpoint, messages)

    async def _ask_server(self, endpoint: OpponentServer, messages: Messages) -> str:
        """Ask the server for a message. RolloutError for a 4xx and for anything but a chat completion; the caller has a
        deadline."""
        system = [{"role": "system", "content": endpoint.system}] if endpoint.system else []
        body = {
            "model": endpoint.model,
            "messages": [*system, *map(dict, messages)],
            "temperature": endpoint.temperature,
            "max_tokens": endpoint.max_tokens,
        }
        url, wait_s = f"{endpoint.url.rstrip('/')}/chat/completions", 0.1
        while True:
            try:
                response = await self._http.post(url, json=body)
                if response.is_success:
                    return str(response.json()["choices"][0]["message"]["content"] or "")
                if not response.is_server_error:
                    raise RolloutError(f"{url} answered {response.status_code}: {response.text[:SHOWN_CHARACTERS]}")
            except httpx.TransportError:
                pass  # asked again below
            except (KeyError, IndexError, TypeError, ValueError) as error:
                raise RolloutError(f"{url} answered with no chat completion: {error!r}") from None
            await anyio.sleep(wait_s)
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)


def _auth_headers() -> dict[str, str]:
    token = os.environ.get(TOKEN_VARIABLE, "")
    return {"Authorization": f"Bearer {token}"} if token else {}
