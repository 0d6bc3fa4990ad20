"""An environment some of whose agents somebody else plays: a Python function, or a model behind a chat endpoint.

What an opponent hears and says never reaches the policy but through the environment, and is neither sampled nor trained: only the
agents that are left are. What opponents earn is theirs and is not reported. An opponent that is frozen gives the policy something
to be measured by, and training something that does not move.

A function is given the chat messages of its agent's view, and returns what it says. An endpoint (OpenAI-compatible: vLLM's
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
from corrente.env.tools import run
from corrente.errors import ConfigError, RolloutError

Messages = Sequence[Mapping[str, Any]]
Opponent = Callable[[Messages], Awaitable[str]]

TOKEN = "CORRENTE_OPPONENT_TOKEN"
"""Environment variable with the bearer token of endpoints."""
THREADS = 64
LONGEST_WAIT_S = 5.0
SHOWN = 200


class OpponentServer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model that plays. ``url`` up to and with /v1; ``system``: a message before all others, empty for none."""

    url: str
    model: str
    system: str = ""
    temperature: float = 1.0
    max_tokens: int = 256


class Against:
    """Implements Environment. ``factory`` and ``options`` make the environment, as ``env.factory`` and ``env.options`` would;
    ``opponents``: by agent, a function by name, or the keys of an Endpoint. ConfigError for what is neither."""

    def __init__(
        self,
        *,
        factory: str,
        opponents: Mapping[str, str | Mapping[str, Any]],
        options: Mapping[str, Any] | None = None,
    ) -> None:
        if not opponents:
            raise ConfigError("env.options.opponents is empty: name an agent and who plays it, or leave Against out")
        self._threads = DaemonThreads(limit=THREADS)
        self._inner: Any = import_callable(factory, key="env.options.factory")(**(options or {}))
        self._http = httpx.AsyncClient(timeout=httpx.Timeout(None, connect=10.0), trust_env=False, headers=_headers())
        self._opponents = {agent: self._opponent(agent, given) for agent, given in opponents.items()}
        self._heard: dict[str, list[Mapping[str, Any]]] = {}

    async def reset(self, task: Mapping[str, Any], *, seed: int) -> Observation:
        """Begin, and play until it is the policy's turn."""
        self._heard = {}
        return await self._until_ours(await self._ask("reset", task=task, seed=seed))

    async def step(self, message: Mapping[str, Any]) -> Observation:
        """Take the policy's turn, and play until it is its turn again."""
        return await self._until_ours(await self._ask("step", message=message))

    async def close(self) -> None:
        """Close the environment and connections."""
        await self._http.aclose()
        await self._ask("close")

    async def _until_ours(self, first: Observation) -> Observation:
        """Rewards for opponents' messages are left out; ``first`` answers the policy's, and what goes to it by name stays."""
        seen, rewards, info = first, dict(first.rewards), dict(first.info)
        while not seen.done and seen.agent in self._opponents:
            heard = self._heard.setdefault(seen.agent, [])
            heard += seen.messages
            said = {"role": "assistant", "content": await self._opponents[seen.agent](heard)}
            heard.append(said)
            seen = await self._ask("step", message=said)
            for agent, reward in seen.rewards.items():
                rewards[agent] = rewards.get(agent, 0.0) + reward
            info |= seen.info
        ours = {agent: reward for agent, reward in rewards.items() if agent not in self._opponents}
        return msgspec.structs.replace(seen, reward=first.reward, rewards=ours, info=info)

    async def _ask(self, method: str, **arguments: Any) -> Any:
        return await run(getattr(self._inner, method), arguments, offload=self._threads)

    def _opponent(self, agent: str, given: str | Mapping[str, Any]) -> Opponent:
        if isinstance(given, str):
            function = import_callable(given, key=f"env.options.opponents.{agent}")

            async def play(messages: Messages) -> str:
                return str(await run(function, {"messages": list(messages)}, offload=self._threads))

            return play
        try:
            endpoint = msgspec.convert(dict(given), OpponentServer)
        except msgspec.ValidationError as error:
            raise ConfigError(f"env.options.opponents.{agent}: {error}; it has url and model") from None
        return lambda messages: self._chat(endpoint, messages)

    async def _chat(self, endpoint: OpponentServer, messages: Messages) -> str:
        """What the endpoint says. RolloutError for a 4xx and for what is no chat completion; the caller has a deadline."""
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
                    raise RolloutError(f"{url} answered {response.status_code}: {response.text[:SHOWN]}")
            except httpx.TransportError:
                pass  # asked again below
            except (KeyError, IndexError, TypeError, ValueError) as error:
                raise RolloutError(f"{url} answered with no chat completion: {error!r}") from None
            await anyio.sleep(wait_s)
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)


def _headers() -> dict[str, str]:
    token = os.environ.get(TOKEN, "")
    return {"Authorization": f"Bearer {token}"} if token else {}
