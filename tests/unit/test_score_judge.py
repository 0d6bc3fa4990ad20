"""A judge over HTTP, on loopback: what it is asked, what is read out of its answer, and who fails how."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
from tests.unit.vllm_fake import DROP, Asked, Fake, Handler, Say, serving

from corrente.config import RunConfig
from corrente.config.load import parse_config
from corrente.data.types import Group
from corrente.errors import ConfigError
from corrente.score.build import open_scorer
from corrente.score.judge import JudgeScale, template_fields
from corrente.testing import samples


def says(text: str | None) -> Say:
    """A chat completion, as OpenAI's API words it."""
    message = {"role": "assistant", "content": text}
    return Say(
        body={"id": "x", "object": "chat.completion", "choices": [{"index": 0, "message": message}], "usage": {}}
    )


def judged(
    handler: Handler, *texts: str, times: int = 1, tls: ssl.SSLContext | None = None, **keys: Any
) -> tuple[list[Group], Fake, dict[str, float]]:
    """Groups scored by a judge that answers what ``handler`` says."""

    async def main() -> tuple[list[Group], Fake, dict[str, float]]:
        async with serving(handler, tls=tls) as fake:
            scorer = {"kind": "judge", "url": f"{fake.url}/v1/", "model": "wise", **keys}
            async with open_scorer(config(scorer)) as panel:
                scored: list[Group] = []

                async def one() -> None:
                    scored.append(await panel.score(samples.group(texts=texts)))

                async with anyio.create_task_group() as tasks:
                    for _ in range(times):
                        tasks.start_soon(one)
                return scored, fake, panel.stats()

    return anyio.run(main)


def config(scorer: dict[str, Any]) -> RunConfig:
    return parse_config({"reward": {"scorers": [scorer]}})


def test_each_completion_is_asked_about_and_the_number_is_scaled(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("CORRENTE_JUDGE_TOKEN", raising=False)

    def handler(asked: Asked) -> Say:
        return says("First I think 3, but no: 8.5" if "{a}" in asked.body["messages"][-1]["content"] else "0")

    (scored,), fake, stats = judged(
        handler, "{a}", "b", template="Task {prompt} gold {answer}: {completion}", system="Be fair.", max_tokens=7
    )
    assert [e.reward for e in scored.episodes] == [0.85, 0.0]
    assert scored.episodes[0].extra == {"judge/said": "First I think 3, but no: 8.5"}
    (asked,) = [a for a in fake.asked if "{a}" in a.body["messages"][-1]["content"]]
    assert asked.path == "/v1/chat/completions"
    assert asked.body == {
        "model": "wise",
        "messages": [
            {"role": "system", "content": "Be fair."},
            {"role": "user", "content": "Task 1 + 1 = gold 2: {a}"},
        ],
        "temperature": 0,
        "max_tokens": 7,
    }
    assert "authorization" not in asked.headers
    assert stats["score/judge_calls"] == 2.0


def test_bearer_token_comes_from_the_config_or_the_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CORRENTE_JUDGE_TOKEN", "from-outside")
    for keys, token in (({}, "from-outside"), ({"token": "given"}, "given")):
        _, fake, _ = judged(lambda _: says("1"), "a", **keys)
        assert fake.asked[0].headers["authorization"] == f"Bearer {token}"


def _after(first: list[Say], then: Say) -> Callable[[Asked], Say]:
    left = list(first)
    return lambda _: left.pop(0) if left else then


@pytest.mark.parametrize("trouble", [Say(status=500), Say(status=503), Say(status=429), DROP])
def test_servers_that_fail_are_asked_again(trouble: Say):
    (scored,), fake, _ = judged(_after([trouble, trouble], says("10")), "a")
    assert [e.reward for e in scored.episodes] == [1.0]
    assert len(fake.asked) == 3


@pytest.mark.parametrize("status", [400, 401, 404, 422])
def test_refusal_fails_at_once_with_the_servers_words(status: int):
    (scored,), fake, stats = judged(lambda _: Say(status=status, body={"error": "no such model"}), "a")
    (lost,) = scored.episodes
    assert lost.status == "failed"
    assert lost.error.startswith("judge: http://127.0.0.1:")
    assert f"it answered {status}: " in lost.error
    assert "no such model" in lost.error
    assert len(fake.asked) == 1
    assert stats["score/judge_failed"] == 1.0


def test_server_that_never_recovers_is_given_up_before_the_deadline_with_the_reason():
    (scored,), fake, _ = judged(lambda _: Say(status=502, body="bad gateway"), "a", deadline_s=0.5)
    (lost,) = scored.episodes
    assert (lost.status, "it answered 502" in lost.error) == ("failed", True)
    assert len(fake.asked) >= 2


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (says("as good as it gets"), "nothing in it matches"),
        (says("11"), "11 is not between 0 and 10"),
        (says(None), "the judge said nothing"),
        (says(""), "the judge said nothing"),
        (Say(body={"choices": []}), "the judge said nothing"),
        (Say(body={"answer": 1}), "answered with no chat completion"),
        (Say(body=[1]), "answered with no chat completion"),
    ],
)
def test_answer_without_a_number_costs_that_episode_alone(answer: Say, why: str):
    def handler(asked: Asked) -> Say:
        return answer if "Answer:\nbad" in asked.body["messages"][0]["content"] else says("5")

    (scored,), _, _ = judged(handler, "good", "bad")
    assert (scored.episodes[0].status, scored.episodes[0].reward) == ("ok", 0.5)
    assert scored.episodes[1].status == "failed"
    assert why in scored.episodes[1].error


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make a certificate")
def test_certificates_are_checked_unless_told_otherwise(tmp_path: Path):
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    kind = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    whom = ("-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1")
    command = ["openssl", "req", "-x509", *kind, "-keyout", str(key), "-out", str(cert), *whom]
    subprocess.run(command, check=True, capture_output=True)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(cert, key)
    for verify, fine in ((str(cert), True), (False, True), (True, False)):
        (scored,), _, _ = judged(lambda _: says("5"), "a", tls=tls, verify=verify, deadline_s=0.5 if not fine else 30)
        (episode,) = scored.episodes
        assert (episode.status, episode.reward) == (("ok", 0.5) if fine else ("failed", None))
        assert fine or "certificate" in episode.error.lower()


def test_questions_open_at_once_are_bounded_over_all_groups():
    scored, fake, stats = judged(lambda _: says("5"), *"abcd", times=8, at_once=3)
    assert len(scored) == 8
    assert all(e.reward == 0.5 for g in scored for e in g.episodes)
    assert fake.most <= 3
    assert stats["score/judge_queue_max"] >= 20.0


def test_failure_policies_of_a_judge():
    for failure, reward in (("none", None), ("default", 0.25)):
        (scored,), _, _ = judged(lambda _: Say(status=400), "a", failure=failure, default=0.25)
        (kept,) = scored.episodes
        assert (kept.status, kept.reward, kept.scores) == ("ok", reward, {"judge": reward})


@pytest.mark.parametrize(
    ("scale", "text", "value"),
    [
        (JudgeScale(), "7", 0.7),
        (JudgeScale(lowest=1, highest=5), "Score: 3", 0.5),
        (JudgeScale(lowest=-1, highest=1), "-0.5", 0.25),
        (JudgeScale(pattern=r"\[\[(\d+)\]\]"), "[[4]] 9", 0.4),
        (JudgeScale(field="score"), 'Well: {"why": "it {is}", "score": 9}.', 0.9),
        (JudgeScale(field="score"), '{"score": "9"}', 0.9),
    ],
)
def test_scale_reads_a_number(scale: JudgeScale, text: str, value: float):
    assert scale.parse_reward(text) == pytest.approx(value)


@pytest.mark.parametrize(
    ("scale", "text"),
    [
        (JudgeScale(field="score"), "9"),
        (JudgeScale(field="score"), '{"rating": 9}'),
        (JudgeScale(field="score"), '{"score": true}'),
        (JudgeScale(field="score"), '{"score": [9]}'),
        (JudgeScale(field="score"), '{"score": "high"}'),
        (JudgeScale(pattern="(nan|inf)"), "nan"),
    ],
)
def test_scale_refuses_what_is_no_number(scale: JudgeScale, text: str):
    with pytest.raises(ValueError, match=r"\S"):
        scale.parse_reward(text)


def test_template_names_its_fields_and_must_be_one():
    assert template_fields("{prompt} {completion} {{}} {answer}") == {"prompt", "completion", "answer"}
    for bad in ("{", "{}", "{0}", "{answer.real}", '{"score": 1}'):
        with pytest.raises(ConfigError, match="template"):
            template_fields(bad)
