"""vLLM's own NCCL engine, as far as a machine without a GPU tells: who is asked what, when, and what a failure leaves."""

from __future__ import annotations

import json
import struct
from collections.abc import Awaitable, Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.vllm_fake import Asked, Fake, Say, serving

from corrente import config as c
from corrente.engine.vllm import environment
from corrente.engine.vllm.client import Client, open_client
from corrente.engine.vllm.nccl_engine import JOIN, VllmNcclEngine
from corrente.errors import SyncError, root_cause
from corrente.sync.base import Update
from corrente.sync.offers import SharedOffer, VllmNcclOffer
from corrente.sync.vllm_nccl import Nccl, buckets

SHAPES = {"a.weight": (2, 3), "b.weight": (4,), "rotary_emb.inv_freq": (2,)}


def write_checkpoint(folder: Path) -> None:
    header = {name: {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]} for name, shape in SHAPES.items()}
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)


def offer(version: int, *, generation: int = 1) -> VllmNcclOffer:
    return VllmNcclOffer(
        version=version,
        slot=version % 2,
        nbytes=48,
        host="10.0.0.1",
        port=4000,
        members=2,
        generation=generation,
        unique_id="aWQ=",
        bucket_bytes=1 << 20,
        deadline_s=9.0,
    )


def with_engine(folder: Path, body: Callable[[VllmNcclEngine, Fake], Awaitable[Any]], *, fails: str = "") -> None:
    write_checkpoint(folder)

    def handler(asked: Asked) -> Say:
        if asked.path == fails:
            return Say(status=500, body={"error": "ncclSystemError"})
        if asked.path == "/v1/models":
            return Say(body={"data": [{"id": "policy", "max_model_len": 32}]})
        return Say(body={"pause_s": 0.5})

    async def run() -> None:
        with anyio.fail_after(20):
            async with serving(handler) as fake, open_client(Client(fake.url)) as client:
                await body(VllmNcclEngine(client, decode=None, source=folder, dtype="bfloat16"), fake)

    try:
        anyio.run(run)
    except BaseExceptionGroup as group:
        raise root_cause(group) from group


def asked_for(fake: Fake, path: str) -> list[Any]:
    return [asked.body for asked in fake.asked if asked.path == path]


def test_weights_come_with_the_flip_by_the_names_of_the_checkpoint(tmp_path: Path) -> None:
    async def body(engine: VllmNcclEngine, fake: Fake) -> None:
        layout = await engine.open()
        assert [slab.sources for slab in layout.slabs] == [("a.weight",), ("b.weight",)]
        for version in (0, 1):
            await engine.reserve(version % 2)
            await engine.receive(offer(version))
            assert await engine.apply(Update(version=version, slot=version % 2), "swap") == 0.5
        assert (await engine.stats()).version == 1
        (meeting,) = asked_for(fake, JOIN)
        assert (meeting["host"], meeting["port"], meeting["members"]) == ("10.0.0.1", 4000, 2)
        first, second = asked_for(fake, "/corrente/flip")
        assert first["update"] == {
            "names": ["a.weight", "b.weight"],
            "dtype_names": ["bfloat16", "bfloat16"],
            "shapes": [[2, 3], [4]],
        }
        assert (second["version"], second["meeting"]) == (1, meeting)
        await engine.receive(offer(2, generation=2))
        assert len(asked_for(fake, JOIN)) == 2

    with_engine(tmp_path, body)


def test_server_that_did_not_meet_the_learner_keeps_its_weights(tmp_path: Path) -> None:
    async def body(engine: VllmNcclEngine, fake: Fake) -> None:
        with pytest.raises(SyncError, match=r"did not meet the learner.*ncclSystemError"):
            await engine.receive(offer(0))
        with pytest.raises(SyncError, match="version 0 was not offered"):
            await engine.apply(Update(version=0, slot=0), "swap")
        with pytest.raises(SyncError, match="by vLLM's own NCCL engine, not by SharedOffer"):
            await engine.receive(SharedOffer(version=0, slot=0, nbytes=1))
        assert not asked_for(fake, "/corrente/flip")

    with_engine(tmp_path, body, fails=JOIN)


def test_server_with_half_a_version_is_given_none_again(tmp_path: Path) -> None:
    async def body(engine: VllmNcclEngine, fake: Fake) -> None:
        await engine.receive(offer(3))
        with pytest.raises(SyncError, match="ncclSystemError"):
            await engine.apply(Update(version=3, slot=1), "swap")
        for again in (lambda: engine.receive(offer(4)), lambda: engine.apply(Update(version=3, slot=1), "swap")):
            with pytest.raises(SyncError, match="holds a part of version 3"):
                await again()
        assert len(asked_for(fake, "/corrente/flip")) == 1

    with_engine(tmp_path, body, fails="/corrente/flip")


def test_server_is_started_with_vllms_own_engine(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    where = environment.VllmEnvironment(python=Path("python"), package="vllm", version="0.32.0")
    config = c.RunConfig(model=c.Model(path=str(tmp_path)), engine=c.Vllm(), sync=c.VllmNccl())
    given_ = dict(pairwise(environment.arguments(config, where, socket=Path("s"))))
    assert json.loads(given_["--weight-transfer-config"]) == {"backend": "nccl"}
    assert "--worker-extension-cls" not in given_


@given(st.lists(st.integers(1, 50), max_size=30), st.integers(1, 100))
def test_buckets_are_cut_where_vllms_receiver_cuts(sizes: list[int], limit: int) -> None:
    """Which adds tensors until their sum exceeds the limit, and takes what is left at the end as a last one."""
    received, bucket = [], []
    for size in sizes:
        bucket.append(size)
        if sum(bucket) > limit:
            received.append(bucket)
            bucket = []
    received += [bucket] if bucket else []
    assert [sizes[part] for part in buckets(sizes, limit)] == received


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_learner_without_nccl_says_so() -> None:
    with pytest.raises(SyncError, match=r'sync.kind = "vllm_nccl" needs no-such-nccl.so'):
        Nccl("no-such-nccl.so")
