"""A session on an OpenEnv server, over OpenEnv's own client. Actions and observations are JSON there, chat messages here.

The policy's message becomes one key of the action, and it reads one key of the observation; without such a key it reads the
whole observation as JSON. Each instance holds one session, opened when it is first reset; a server takes as many at once as it
was started for, so set ``env.instances`` to that; to less where a reward function takes ``environments``, or any argument: those
it has yet to look at are open beside those in play.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from corrente.env.adapters.packages import import_package
from corrente.env.environment import Observation
from corrente.errors import RolloutError


class OpenEnv:
    """Implements Environment. ``url``: of the server. ``action``: the key of an action that holds the policy's message, beside
    the fixed ones in ``extra``. ``shown``: the key of an observation that is read; empty: all. ``instruction``: said first."""

    def __init__(
        self,
        url: str,
        *,
        action: str = "message",
        extra: Mapping[str, Any] | None = None,
        shown: str = "",
        instruction: str = "",
    ) -> None:
        client = import_package("openenv.core.generic_client", of="OpenEnv", install="openenv")
        self._client = client.GenericEnvClient(base_url=url, message_timeout_s=3600.0)  # env.deadline_s comes first
        self._action, self._extra, self._shown = action, dict(extra or {}), shown
        self._instruction = instruction
        self._connected = False

    async def reset(self, task: Mapping[str, Any], *, seed: int) -> Observation:
        """Begin an episode; the server gets the seed."""
        if not self._connected:
            await self._client.connect()
            self._connected = True
        result = await self._client.reset(seed=seed)
        text = self._observation_text(result.observation)
        return Observation(messages=(_user_message(f"{self._instruction}\n\n{text}" if self._instruction else text),))

    async def step(self, message: Mapping[str, Any]) -> Observation:
        """Send an action."""
        result = await self._client.step({**self._extra, self._action: str(message.get("content") or "")})
        reward = None if result.reward is None else float(result.reward)
        return Observation(
            reward=reward, done=bool(result.done), messages=(_user_message(self._observation_text(result.observation)),)
        )

    async def close(self) -> None:
        """End the session."""
        await self._client.close()

    def _observation_text(self, seen: Mapping[str, Any]) -> str:
        if not self._shown:
            return json.dumps(seen, ensure_ascii=False)
        if self._shown not in seen:
            raise RolloutError(
                f"OpenEnv: the observation has no {self._shown!r}; it has {', '.join(seen) or 'nothing'}"
            )
        value = seen[self._shown]
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _user_message(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}
