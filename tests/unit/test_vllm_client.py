"""The vLLM engine against a fake server: what is sent, what is made of answers, and what faults become."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import httpx2 as httpx
import numpy as np
import pytest
from tests.unit.vllm_fake import DROP, Asked, Fake, Handler, Say, piece, refusal, serving

from corrente.data.types import Request
from corrente.engine.vllm import client as clients
from corrente.engine.vllm import launcher
from corrente.engine.vllm.client import Client, open_client
from corrente.engine.vllm.engine import VllmEngine
from corrente.errors import AlignmentError, ConfigError, GenerationError, SyncError, WorkerDied, root_cause
from corrente.sync.base import Update
from corrente.sync.offers import SharedOffer
from corrente.testing import run_virtual, samples

LAYOUT = {"slabs": [{"name": "w", "shape": [2], "dtype": "float32", "offset": 0, "sources": ["w"], "transpose": False}]}
PROMPT = np.array([5, 6, 7], np.int32)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "FIRST_RETRY_WAIT_S", 0.001)


def control(asked: Asked) -> Say:
    """The calls that are no generation, all of which go well."""
    if asked.path == "/v1/models":
        return Say(body={"data": [{"id": "policy", "max_model_len": 32}]})
    if asked.path == "/collective_rpc":
        done = {
            "check_health": None,
            "corrente_layout": LAYOUT,
            "corrente_status": {"busy": False, "failure": "", "seconds": 0.1},
        }
        return Say(body={"results": [done[asked.body["method"]]]})
    if asked.path == "/corrente/flip":
        return Say(body={"pause_s": 0.004})
    return Say(body={})


def generating(answer: Callable[[Asked, str], Say]) -> Handler:
    """``answer`` is given what was asked, and the label of the version that is live."""
    live = [""]

    def handler(asked: Asked) -> Say:
        if asked.path == "/corrente/flip":
            live[0] = asked.body["label"]
        return answer(asked, live[0]) if asked.path == "/inference/v1/generate" else control(asked)

    return handler


def with_engine(
    handler: Handler,
    body: Callable[[VllmEngine, Fake], Awaitable[Any]],
    *,
    tls: ssl.SSLContext | None = None,
    **more: Any,
) -> Any:
    async def run() -> Any:
        with anyio.fail_after(20):
            async with serving(handler, tls=tls) as fake, open_client(Client(fake.url, **more)) as client:
                engine = VllmEngine(client, decode=lambda ids: "".join(chr(97 + i % 26) for i in ids))
                await engine.open()
                await engine.apply(Update(version=4, slot=0), "swap")
                return await body(engine, fake)

    try:
        return anyio.run(run)
    except BaseExceptionGroup as group:
        raise root_cause(group) from group


def ask(name: str = "a", **sampling: Any) -> Request:
    return samples.request(id=name, tokens=PROMPT, seed=9, **{"max_tokens": 4, **sampling})


def three(asked: Asked, live: str) -> Say:
    first = piece([1, 2], versions=[(live, 0, 2)])
    return Say(events=(first, piece([3], versions=[(live, 0, 3)], finish="stop")))


def test_tokens_come_back_as_they_were_sampled() -> None:
    async def body(engine: VllmEngine, fake: Fake) -> None:
        done = await engine.generate(ask(temperature=0.5, top_k=3, top_p=0.9, min_p=0.01, stop_token_ids=(3,)))
        assert done.tokens.tolist() == [1, 2, 3]
        assert done.logprobs.tolist() == pytest.approx([-0.01, -0.02, -0.03])
        assert [(span.version, span.start, span.stop) for span in done.spans] == [(4, 0, 3)]
        assert (done.finish_reason, done.text) == ("stop", "bc")
        sent = fake.asked[-1].body
        assert sent["token_ids"] == [5, 6, 7]
        wanted = {
            "max_tokens": 4,
            "temperature": 0.5,
            "top_k": 3,
            "top_p": 0.9,
            "min_p": 0.01,
            "seed": 9,
            "logprobs": 0,
        }
        assert sent["sampling_params"].items() >= wanted.items()
        stats = await engine.stats()
        assert (stats.version, stats.running, stats.decode_tokens, stats.prefill_tokens) == (4, 0, 3, 3)

    with_engine(generating(three), body)


def test_spans_are_those_the_server_reports_and_only_of_this_run() -> None:
    def across(asked: Asked, live: str) -> Say:
        mark = live.partition("/")[0]
        return Say(events=(piece([1, 2, 3], versions=[(f"{mark}/3", 0, 1), (live, 1, 3)], finish="length"),))

    def foreign(asked: Asked, live: str) -> Say:
        return Say(events=(piece([1], versions=[("default", 0, 1)], finish="length"),))

    async def body(engine: VllmEngine, fake: Fake) -> None:
        done = await engine.generate(ask())
        assert [(span.version, span.start, span.stop) for span in done.spans] == [(3, 0, 1), (4, 1, 3)]
        fake.handler = generating(foreign)
        with pytest.raises(GenerationError, match="'default'"):
            await engine.generate(ask())

    with_engine(generating(across), body)


def test_refused_request_fails_at_once_with_the_servers_words() -> None:
    async def body(engine: VllmEngine, fake: Fake) -> None:
        before = len(fake.asked)
        with pytest.raises(GenerationError, match=r"request a: .*400 temperature must be non-negative"):
            await engine.generate(ask())
        assert len(fake.asked) == before + 1

    with_engine(generating(lambda asked, live: refusal(400, "temperature must be non-negative")), body)


@pytest.mark.parametrize("fault", ["503", "dropped", "cut", "error event", "no end"])
def test_fault_of_the_server_is_tried_again(fault: str) -> None:
    tries: list[int] = []

    def answer(asked: Asked, live: str) -> Say:
        tries.append(asked.body["sampling_params"]["seed"])
        if len(tries) > 2:
            return three(asked, live)
        begun = piece([7], versions=[(live, 0, 1)])
        return {
            "503": refusal(503, "overloaded"),
            "dropped": DROP,
            "cut": Say(events=(begun,), hang_up=True),
            "error event": Say(events=(begun, {"error": {"message": "EngineCore encountered an issue", "code": 500}})),
            "no end": Say(events=(begun,)),
        }[fault]

    async def body(engine: VllmEngine, fake: Fake) -> None:
        done = await engine.generate(ask())
        assert done.tokens.tolist() == [1, 2, 3], "what a lost attempt had is not part of it"
        assert tries == [9, 9, 9]

    with_engine(generating(answer), body)


def test_attempts_are_bounded_in_number_and_in_time() -> None:
    async def few(engine: VllmEngine, fake: Fake) -> None:
        before = len(fake.asked)
        with pytest.raises(GenerationError, match=r"overloaded; gave up after 3 attempts \(engine.retries\)"):
            await engine.generate(ask())
        assert len(fake.asked) == before + 3

    handler = generating(lambda asked, live: refusal(503, "overloaded"))
    with_engine(handler, few, retries=2)

    async def short(engine: VllmEngine, fake: Fake) -> None:
        fake.gate = anyio.Event()
        with pytest.raises(GenerationError, match=r"0.2 s \(engine.request_deadline_s\)"):
            await engine.generate(ask())
        assert (await engine.stats()).running == 0

    with_engine(generating(three), short, deadline_s=0.2)


def test_dead_server_is_not_asked_again() -> None:
    dead: list[WorkerDied] = []

    async def body(engine: VllmEngine, fake: Fake) -> None:
        dead.append(WorkerDied("vllm-0 was killed by signal 9; last output: oops"))
        before = len(fake.asked)
        with pytest.raises(WorkerDied, match="oops"):
            await engine.generate(ask())
        assert len(fake.asked) == before + 1

    with_engine(generating(lambda asked, live: DROP), body, death=lambda: dead[0] if dead else None)


def test_attached_server_that_refuses_to_say_how_it_is_lives() -> None:
    def answer(asked: httpx.Request) -> httpx.Response:
        if anyio.current_time() < 100:
            return httpx.Response(404)
        raise httpx.ConnectError("gone")

    async def run() -> tuple[str, float]:
        async with open_client(Client("http://far", transport=httpx.MockTransport(answer))) as client:
            return str(await launcher.await_loss(client, "far")), anyio.current_time()

    words, ended_s = run_virtual(run, limit_s=1000)
    assert ended_s == pytest.approx(104, abs=1)
    assert words == "far could not be reached for 5 s: http://far: ConnectError: gone"


def test_server_that_hangs_is_found_out_by_who_asks_for_its_counters() -> None:
    async def body(engine: VllmEngine, fake: Fake) -> None:
        seen: list[int] = []

        async def look() -> None:
            seen.append((await engine.stats()).version)

        fake.awake, before = anyio.Event(), len(fake.asked)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(look)
            while len(fake.asked) == before:
                await anyio.sleep(0.001)
            await anyio.wait_all_tasks_blocked()
            assert not seen
            fake.awake.set()
        assert seen == [4]

    with_engine(control, body)


@pytest.mark.parametrize("answer", [DROP, Say(status=500), refusal(404, "no such path")])
def test_counters_are_told_whatever_the_server_answers(answer: Say) -> None:
    async def body(engine: VllmEngine, fake: Fake) -> None:
        fake.handler = lambda _: answer
        assert (await engine.stats()).version == 4

    with_engine(control, body)


def test_many_requests_are_at_the_server_at_once() -> None:
    """HTTP clients queue beyond a hundred connections unless told otherwise."""

    async def body(engine: VllmEngine, fake: Fake) -> None:
        fake.gate = anyio.Event()
        async with anyio.create_task_group() as tasks:
            for at in range(150):
                tasks.start_soon(engine.generate, ask(str(at)))
            while (await engine.stats()).running < 150:
                await anyio.sleep(0.01)
            partials = await engine.partial_completions(["3", "149", "nobody"])
            assert {name: p.tokens.tolist() for name, p in partials.items()} == {"3": [1, 2], "149": [1, 2]}
            assert {p.finish_reason for p in partials.values()} == {"abort"}
            fake.gate.set()
        assert fake.most >= 150

    with_engine(generating(three), body)


def test_abort_names_the_request_as_the_server_knows_it() -> None:
    async def body(engine: VllmEngine, fake: Fake) -> None:
        fake.gate = anyio.Event()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(engine.generate, ask("a"))
            while not (await engine.stats()).running:
                await anyio.sleep(0.001)
            sent = next(asked.body for asked in fake.asked if asked.path == "/inference/v1/generate")
            await engine.abort(["a", "nobody"])
            assert fake.asked[-1].body == {"request_ids": [f"generate-tokens-{sent['request_id']}"]}
            before = len(fake.asked)
            await engine.abort(["nobody"])
            assert len(fake.asked) == before
            fake.gate.set()

    with_engine(generating(three), body)


def test_abort_that_came_too_early_is_repeated() -> None:
    """Before the server knew the request; its first tokens say that it does now."""

    async def body(engine: VllmEngine, fake: Fake) -> None:
        fake.gate = anyio.Event()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(engine.generate, ask("a"))
            while not (await engine.stats()).waiting:
                await anyio.sleep(0)
            await engine.abort(["a"])
            while sum(asked.path == "/inference/v1/abort_requests" for asked in fake.asked) < 2:
                await anyio.sleep(0.001)
            fake.gate.set()

    with_engine(generating(three), body)


def test_request_that_was_aborted_is_not_tried_again() -> None:
    async def body(engine: VllmEngine, fake: Fake) -> None:
        fake.gate = anyio.Event()
        done: list[Any] = []

        async def one() -> None:
            done.append(await engine.generate(ask("a")))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(one)
            while not (await engine.stats()).running:
                await anyio.sleep(0.001)
            await engine.abort(["a"])
            fake.gate.set()
        assert (done[0].finish_reason, len(done[0].tokens)) == ("abort", 0)

    with_engine(generating(lambda asked, live: Say(events=(piece([7], versions=[(live, 0, 1)]),), hang_up=True)), body)


def test_resumed_request_counts_what_is_written_and_draws_anew() -> None:
    async def body(engine: VllmEngine, fake: Fake) -> None:
        partial = await engine.generate(ask())
        request = ask(max_tokens=10).resumed_after(partial)
        rest = await engine.generate(request)
        sent = fake.asked[-1].body
        assert sent["token_ids"] == [5, 6, 7, 1, 2, 3]
        assert sent["sampling_params"]["max_tokens"] == 7
        assert sent["sampling_params"]["seed"] not in (9, 0)
        assert rest.text == "bcdbc"
        before = len(fake.asked)
        spent = await engine.generate(ask(max_tokens=3).resumed_after(partial))
        assert (len(spent.tokens), spent.finish_reason) == (0, "length")
        assert len(fake.asked) == before
        long = samples.request(tokens=range(30), max_tokens=50)
        await engine.generate(long)
        assert fake.asked[-1].body["sampling_params"]["max_tokens"] == 2, "clipped to the context"
        with pytest.raises(GenerationError, match="leave no room in 32"):
            await engine.generate(samples.request(tokens=range(32)))
        spent = samples.request(tokens=range(32), max_tokens=9, written=9)
        assert (await engine.generate(spent)).finish_reason == "length"

    with_engine(generating(three), body)


def test_stop_string_across_an_interruption_is_seen() -> None:
    """The server knows the new tokens only: "cd" with "c" written before."""

    async def body(engine: VllmEngine, fake: Fake) -> None:
        request = samples.request(tokens=(5, 1, 2), stop=("cd",), written=2)
        done = await engine.generate(request)
        assert (done.tokens.tolist(), done.finish_reason, done.text) == ([3], "stop", "b")
        assert [(span.start, span.stop) for span in done.spans] == [(0, 1)]
        over = samples.request(tokens=request.tokens, stop=("bc",), written=2)
        before = len(fake.asked)
        done = await engine.generate(over)
        assert (len(done.tokens), done.finish_reason, done.text) == (0, "stop", "")
        assert len(fake.asked) == before

    def answer(asked: Asked, live: str) -> Say:
        return Say(
            events=(piece([3, 4], versions=[(live, 0, 2)]), piece([5], versions=[(live, 0, 3)], finish="length"))
        )

    with_engine(generating(answer), body)


def test_answers_that_do_not_line_up_are_refused() -> None:
    def answer(asked: Asked, live: str) -> Say:
        event = piece([1, 2], versions=[(live, 0, 2)], finish="length")
        event["choices"][0]["logprobs"]["content"].pop()
        return Say(events=(event,))

    async def body(engine: VllmEngine, fake: Fake) -> None:
        with pytest.raises(AlignmentError, match="2 tokens and 1 log-probs"):
            await engine.generate(ask())

    with_engine(generating(answer), body)


def test_request_that_failed_in_the_server_is_tried_again_and_never_taken_for_done() -> None:
    async def body(engine: VllmEngine, fake: Fake) -> None:
        done = await engine.generate(ask())
        assert (done.tokens.tolist(), done.finish_reason) == ([1, 2, 3], "stop")
        with pytest.raises(
            GenerationError, match="the server ended the request with 'error'; gave up after 2 attempts"
        ):
            await engine.generate(ask("b"))

    ends = iter(["error", "good", "error", "error"])

    def answer(asked: Asked, live: str) -> Say:
        if next(ends) == "good":
            return three(asked, live)
        return Say(events=(piece([1], versions=[(live, 0, 1)], finish="error"),))

    with_engine(generating(answer), body, retries=1)


def test_new_requests_never_meet_the_keys_of_old_weights() -> None:
    async def body(engine: VllmEngine, fake: Fake) -> None:
        salts = []
        for version in (5, 6):
            await engine.generate(ask())
            salts.append(fake.asked[-1].body["cache_salt"])
            await engine.apply(Update(version=version, slot=version % 2), "swap")
            assert fake.asked[-1].body["recompute"] is False
        assert len(set(salts)) == 2
        await engine.apply(Update(version=7, slot=1), "recompute")
        assert fake.asked[-1].body["recompute"] is True
        with pytest.raises(SyncError, match=r"inflight\.kind"):
            await engine.apply(Update(version=8, slot=0), "snapshot")

    with_engine(generating(three), body)


def test_failed_transfer_or_flip_is_a_sync_error_with_the_servers_words() -> None:
    async def body(engine: VllmEngine, fake: Fake) -> None:
        good = fake.handler

        def failing(asked: Asked) -> Say:
            if asked.path == "/collective_rpc":
                return Say(body={"results": [{"busy": False, "failure": "the disk is full", "seconds": 0.1}]})
            return (
                Say(status=500, body={"error": "slot 1 holds nothing"})
                if asked.path == "/corrente/flip"
                else good(asked)
            )

        fake.handler = failing
        with pytest.raises(SyncError, match="the disk is full"):
            await engine.receive(SharedOffer(version=5, slot=1, nbytes=8))
        with pytest.raises(SyncError, match="slot 1 holds nothing"):
            await engine.apply(Update(version=5, slot=1), "swap")
        fake.handler = good
        assert {span.version for span in (await engine.generate(ask())).spans} == {4}

    with_engine(generating(three), body)


def test_score_reads_the_log_probs_of_the_prompt() -> None:
    def answer(asked: Asked, live: str) -> Say:
        assert asked.body["sampling_params"]["prompt_logprobs"] == 2
        given = [None]
        for token in asked.body["token_ids"][1:]:
            place = {"40": {"logprob": -0.1, "rank": 1}, "41": {"logprob": -2.0, "rank": 2}}
            given.append({str(token): {"logprob": -7.5, "rank": 20}, **place})
        return Say(body={"prompt_logprobs": given})

    async def body(engine: VllmEngine, fake: Fake) -> None:
        scores = await engine.score(np.array([5, 6, 40], np.int32), top=2)
        assert scores.logprobs.tolist() == pytest.approx([-7.5, -0.1])
        assert scores.top_ids.tolist() == [[40, 41], [40, 41]]
        assert scores.top_logprobs[0].tolist() == pytest.approx([-0.1, -2.0])
        assert (await engine.score(PROMPT[:1])).logprobs.shape == (0,)

    with_engine(generating(answer), body)


def test_bearer_token_goes_with_every_call() -> None:
    def guarded(asked: Asked) -> Say:
        if asked.headers.get("authorization") != "Bearer sesame":
            return Say(status=401, body={"error": "a valid bearer token is needed"})
        return generating(three)(asked)

    async def body(engine: VllmEngine, fake: Fake) -> None:
        assert {asked.headers["authorization"] for asked in fake.asked} == {"Bearer sesame"}

    with_engine(guarded, body, token="sesame")
    with pytest.raises(GenerationError, match="401 a valid bearer token is needed"):
        with_engine(guarded, body, token="wrong")


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make a certificate")
def test_certificates_are_checked_unless_told_otherwise(tmp_path: Path) -> None:
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
            *(
                "-keyout",
                str(key),
                "-out",
                str(cert),
                "-subj",
                "/CN=127.0.0.1",
                "-addext",
                "subjectAltName=IP:127.0.0.1",
            ),
        ],
        check=True,
        capture_output=True,
    )
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(cert, key)

    async def body(engine: VllmEngine, fake: Fake) -> None:
        assert (await engine.generate(ask())).tokens.tolist() == [1, 2, 3]

    with_engine(generating(three), body, verify=str(cert), tls=tls)
    with_engine(generating(three), body, verify=False, tls=tls)
    with pytest.raises(clients.ServerError, match=r"(?i)certificate"):
        with_engine(generating(three), body, tls=tls)
    with pytest.raises(ConfigError, match=r"engine\.verify"):
        Client("https://127.0.0.1:1", verify=str(key))
