"""Kept sets and experts as vLLM 0.32 sends them: read where the server sends them, refused by name where it does not."""

from __future__ import annotations

import base64
import io
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from tests.unit.test_vllm_checks import config, python
from tests.unit.test_vllm_client import PROMPT, Handler, ask, generating
from tests.unit.vllm_fake import Asked, Fake, Say, piece, serving

from corrente import config as c
from corrente.data.types import Sampling
from corrente.engine.vllm import environment
from corrente.engine.vllm.answers import parse_routing
from corrente.engine.vllm.checks import check
from corrente.engine.vllm.client import Client, open_client
from corrente.engine.vllm.engine import VllmEngine
from corrente.errors import AlignmentError, ConfigError, GenerationError
from corrente.sync.base import Update

__all__ = ["python"]


def with_sets(handler: Handler, body: Callable[[VllmEngine, Fake], Awaitable[Any]], *, vocabulary: int = 50) -> Any:
    async def run() -> Any:
        with anyio.fail_after(20):
            async with serving(handler) as fake, open_client(Client(fake.url, retries=0)) as client:
                engine = VllmEngine(client, decode=None, vocabulary=vocabulary)
                await engine.open()
                await engine.apply(Update(version=4, slot=0), "swap")
                return await body(engine, fake)

    return anyio.run(run)


def encoded(array: np.ndarray) -> str:
    """As vLLM's numpy2base64 writes it."""
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return base64.b64encode(buffer.getvalue()).decode()


def saying(*, sets: list[list[list[int]] | None], experts: str | None = None) -> Callable[[Asked, str], Say]:
    """Tokens 1 and 2, then 3, with these kept sets, and experts with the last piece."""

    def answer(_asked: Asked, live: str) -> Say:
        events = (
            piece([1, 2], versions=[(live, 0, 2)]),
            piece([3], versions=[(live, 0, 3)], finish="length"),
        )
        for event, said in zip(events, sets, strict=True):
            event["choices"][0]["sampling_mask"] = said
        events[-1]["choices"][0]["routed_experts"] = experts
        return Say(events=events)

    return answer


def test_kept_sets_of_a_streamed_answer_are_its_support():
    async def body(engine: VllmEngine, fake: Fake) -> None:
        done = await engine.generate(ask(top_k=3))
        assert done.support is not None
        assert [done.support.ids_at(at).tolist() for at in range(3)] == [[1, 7], [2], [3, 4, 49]]
        assert done.support.vocabulary == 50

    with_sets(generating(saying(sets=[[[7, 1], [2]], [[49, 3, 4]]])), body)


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        ([None, None], "no kept sets came with 2 tokens: start the server with --return-sampling-mask"),
        ([[[1]], [[3]]], "2 tokens and 1 kept sets"),
        ([[[1], [2]], [[5, 6]]], "token 3 at 2 is not in the set"),
    ],
)
def test_kept_sets_that_do_not_line_up_are_refused(sets: Any, words: str):
    async def body(engine: VllmEngine, fake: Fake) -> None:
        with pytest.raises((AlignmentError, GenerationError), match=words):
            await engine.generate(ask(top_k=3))

    with_sets(generating(saying(sets=sets)), body)


def test_greedy_requests_are_asked_for_as_a_server_with_kept_sets_takes_them():
    async def body(engine: VllmEngine, fake: Fake) -> None:
        done = await engine.generate(ask(temperature=0.0))
        assert done.support is None
        sent = fake.asked[-1].body["sampling_params"]
        assert (sent["temperature"], sent["top_k"]) == (1.0, 1)

    with_sets(generating(saying(sets=[[[1], [2]], [[3]]])), body)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32])
def test_experts_are_split_into_those_of_the_context_and_of_each_draw(dtype: Any):
    experts = np.arange(5 * 2 * 2).reshape(5, 2, 2).astype(dtype)

    async def body(engine: VllmEngine, fake: Fake) -> None:
        done = await engine.generate(ask())
        assert done.routing is not None
        assert done.routing.context.tolist() == experts[: len(PROMPT) - 1].tolist()
        assert done.routing.experts.tolist() == experts[len(PROMPT) - 1 :].tolist()
        assert done.routing.experts.dtype == np.int16

    with_sets(generating(saying(sets=[None, None], experts=encoded(experts))), body, vocabulary=0)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("!!", "cannot be read"),
        (encoded(np.zeros((4, 2, 2), np.uint8)), "5 tokens were read"),
        (encoded(np.zeros((5, 2), np.uint8)), "5 tokens were read"),
        (encoded(np.zeros((5, 2, 2), np.float32)), "float32 came"),
    ],
)
def test_experts_that_do_not_line_up_are_refused(said: str, words: str):
    with pytest.raises(AlignmentError, match=words):
        parse_routing(said, context=3, sampled=3)


# ---- what is refused before a server is started -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"sampling": Sampling(top_p=0.9)}, r"sampling\.top_k = 0: .* only where top_k bounds it"),
        (
            {"sampling": Sampling(top_k=9), "eval": c.Eval(temperature=1.0)},
            r"eval\.top_k = 0: .* give it, or eval\.temperature = 0",
        ),
        (
            {"sampling": Sampling(top_k=9), "eval": c.Eval(samples=4)},
            r"eval\.top_k = 0: .* give it, or eval\.temperature = 0",
        ),
    ],
)
def test_kept_sets_that_a_server_cannot_say_are_refused(sections: dict[str, Any], words: str):
    with pytest.raises(ConfigError, match=words):
        check(config(**sections))


def test_kept_sets_and_experts_are_refused_on_a_cpu(python: Path):
    launched = c.Vllm(python=str(python))
    with pytest.raises(ConfigError, match=r"sampling\.keep_support = true: vLLM does not say on a CPU"):
        check(c.RunConfig(engine=launched, sampling=Sampling(top_k=9)))
    with pytest.raises(ConfigError, match=r"model\.keep_routing = true: vLLM says no experts on a CPU"):
        check(c.RunConfig(engine=launched, model=c.Model(keep_routing=True)))
    check(c.RunConfig(engine=launched, sampling=Sampling(top_k=9, keep_support=False)))


def test_launched_server_is_told_to_say_what_a_run_keeps(python: Path, tmp_path: Path):
    (tmp_path / "config.json").write_text('{"vocab_size": 77, "hidden_size": 4, "num_attention_heads": 1}')
    plain = c.RunConfig(model=c.Model(path=str(tmp_path)), engine=c.Vllm(python=str(python)))
    kept = c.RunConfig(
        model=c.Model(path=str(tmp_path), keep_routing=True), engine=plain.engine, sampling=Sampling(top_k=5, top_p=0.9)
    )
    where = environment.find(str(python))
    flags = {"--return-sampling-mask", "--enable-return-routed-experts"}
    assert flags <= set(environment.arguments(kept, where, socket=tmp_path / "s"))
    assert not flags & set(environment.arguments(plain, where, socket=tmp_path / "s"))
    assert (environment.vocabulary(kept), environment.vocabulary(plain)) == (77, 0)
