"""Attaching to servers that run already, or are about to: against a fake one."""

from __future__ import annotations

import re
from pathlib import Path

import anyio
import pytest
from tests.unit.test_vllm_client import control
from tests.unit.vllm_fake import Asked, Handler, Say, serving

from corrente import config as c
from corrente.common.local_spawner import open_local_spawner
from corrente.engine.vllm import launcher
from corrente.engine.vllm.launcher import VllmLauncher
from corrente.errors import ConfigError, root_cause
from corrente.runtime.run_weights import RunWeights


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "POLL_S", 0.001)


def attach(handler: Handler, folder: Path, *, within_s: float, told: list[str] | None = None) -> str:
    """The name of the replica."""
    said = [] if told is None else told

    async def run() -> str:
        with anyio.fail_after(20):
            async with serving(handler) as fake, open_local_spawner() as spawner:
                engine = c.Vllm(urls=(fake.url,), start_deadline_s=within_s)
                config = c.RunConfig(engine=engine, model=c.Model(path=str(folder)), sync=c.Disk())
                made = VllmLauncher(
                    config,
                    weights=RunWeights(),
                    spawner=spawner,
                    log_event=lambda level, line: said.append(f"{level}: {line}"),
                )
                async with made.launch(0) as replica:
                    return replica.name

    try:
        return anyio.run(run)
    except BaseExceptionGroup as group:
        raise root_cause(group) from group


def starting(answers: int) -> Handler:
    """A server that says for ``answers`` times that it is not ready."""
    left = [answers]

    def handler(asked: Asked) -> Say:
        if asked.path == "/health" and left[0]:
            left[0] -= 1
        return Say(status=503, body={"error": "loading"}) if left[0] else control(asked)

    return handler


def test_server_that_is_still_starting_is_waited_for(tmp_path: Path) -> None:
    assert attach(starting(5), tmp_path, within_s=15.0).startswith("vllm at http://")


def test_it_is_said_once_what_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    assert attach(starting(2), tmp_path, within_s=15.0, told=told)
    assert not told
    monkeypatch.setattr(launcher, "QUIET_S", 0.0)
    assert attach(starting(5), tmp_path, within_s=15.0, told=told)
    (line,) = told
    assert re.fullmatch(r"info: waiting for http://\S+ \(.*\); engine\.start_deadline_s allows 15 s", line)


def test_server_that_never_answers_is_named_with_the_key_that_allows_more(tmp_path: Path) -> None:
    words = r"engine\.urls: http://.* did not answer within engine\.start_deadline_s = 0\.2 s: /health: 503 loading"
    with pytest.raises(ConfigError, match=words):
        attach(starting(1 << 30), tmp_path, within_s=0.2)


def test_server_that_refuses_is_not_waited_for(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"does not answer as an engine does .*403 no entry"):
        attach(lambda _: Say(status=403, body={"error": "no entry"}), tmp_path, within_s=600.0)
