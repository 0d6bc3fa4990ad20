"""A real OpenEnv server on loopback, played through our protocol. Skipped where OpenEnv and what it needs is not installed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import anyio
import pytest

from corrente.env.adapters.openenv import OpenEnv
from corrente.env.environment import Observation
from corrente.errors import ConfigError, RolloutError

pytestmark = pytest.mark.slow


@contextmanager
def _server() -> Iterator[str]:
    """An environment that counts letters: each message earns its length, the second ends the episode."""
    pytest.importorskip("openenv.core.generic_client", reason="pip install openenv", exc_type=ImportError)
    import uvicorn
    from openenv.core.env_server import Action, Environment, State, create_fastapi_app
    from openenv.core.env_server import Observation as Seen

    class Said(Action):
        text: str
        loud: bool = False

    class Heard(Seen):
        response: str = ""

    class Letters(Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Heard:
            self._turn = 0
            return Heard(response=f"seed {seed}")

        def step(self, action: Said, timeout_s: float | None = None, **kwargs: Any) -> Heard:
            self._turn += 1
            said = action.text.upper() if action.loud else action.text
            return Heard(response=said, reward=float(len(action.text)), done=self._turn == 2)

        @property
        def state(self) -> State:
            return State()

    app = create_fastapi_app(Letters, Said, Heard, max_concurrent_envs=4)
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive(), "the server ended"
            thread.join(0.02)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)


def _play(environment: OpenEnv, *said: str, seed: int = 7) -> list[Observation]:
    async def main() -> list[Observation]:
        try:
            out = [await environment.reset({}, seed=seed)]
            out += [await environment.step({"role": "assistant", "content": text}) for text in said]
            return out
        finally:
            await environment.close()

    return anyio.run(main)


def _texts(observations: list[Observation]) -> list[str]:
    return [message["content"] for seen in observations for message in seen.messages]


def test_openenv_session_is_played_with_messages():
    with _server() as url:
        environment = OpenEnv(url, action="text", extra={"loud": True}, shown="response", instruction="Say a word.")
        seen = _play(environment, "sea", "harbour")
    assert _texts(seen) == ["Say a word.\n\nseed 7", "SEA", "HARBOUR"]
    assert [(o.reward, o.done) for o in seen] == [(None, False), (3.0, False), (7.0, True)]


def test_openenv_observation_without_a_key_is_read_as_json():
    with _server() as url:
        assert '"response": "seed 7"' in _texts(_play(OpenEnv(url, action="text")))[0]


def test_openenv_key_that_is_not_there_costs_the_episode():
    with _server() as url, pytest.raises(RolloutError, match=r"no 'answer'; it has .*response"):
        _play(OpenEnv(url, action="text", shown="answer"))


def test_openenv_missing_package_is_named(monkeypatch: pytest.MonkeyPatch):
    import sys

    monkeypatch.setitem(sys.modules, "openenv.core.generic_client", None)
    with pytest.raises(ConfigError, match="pip install openenv"):
        OpenEnv("http://127.0.0.1:1")
