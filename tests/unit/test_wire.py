"""Messages between processes arrive as they were sent, or are refused."""

from __future__ import annotations

import struct

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from corrente import errors
from corrente.common import rpc
from corrente.common.serialization import decode, encode
from corrente.config import Double, RunConfig, Swap
from corrente.data.types import Batch, Completion, Floats, Request, Row, Sampling, Span
from corrente.runtime import wire
from corrente.sync import offers
from corrente.sync.base import OfferRequest, Update


def _carried(body: wire.Body) -> wire.Body:
    (data,) = rpc.FrameReader().feed(rpc.frame(rpc.RpcCall(7, body)))
    call: rpc.RpcCall[wire.Body] = decode(data, rpc.RpcCall[wire.Body])
    assert call.id == 7
    return call.body


def _row(length: int) -> Row:
    rng = np.random.default_rng(length)
    return Row(
        group=3,
        tokens=rng.integers(0, 100, length).astype(np.int32),
        loss_mask=rng.random(length) < 0.5,
        logprobs=rng.normal(size=length).astype(np.float32),
        versions=rng.integers(0, 5, length).astype(np.int32),
        advantages=rng.normal(size=length).astype(np.float32),
    )


def test_batch_crosses_bit_for_bit():
    batch = Batch(step=4, version=2, rows=(_row(5), _row(0), _row(1)), sequences=3, tokens=6)
    body = _carried(wire.StepRpc(batch=batch))
    assert isinstance(body, wire.StepRpc)
    assert (body.batch.step, body.batch.version, body.batch.sequences, body.batch.tokens) == (4, 2, 3, 6)
    for got, sent in zip(body.batch.rows, batch.rows, strict=True):
        for name in ("tokens", "loss_mask", "logprobs", "versions", "advantages"):
            a, b = getattr(got, name), getattr(sent, name)
            assert a.dtype == b.dtype
            assert a.tobytes() == b.tobytes()
            assert a.flags.writeable
            assert a.flags.owndata


def test_request_and_config_cross_with_their_tagged_sections():
    request = Request(id="a/0", tokens=np.arange(3, dtype=np.int32), sampling=Sampling(stop=("\n",)), seed=5, group="a")
    body = _carried(wire.Generate(request=request))
    assert isinstance(body, wire.Generate)
    assert body.request.sampling == request.sampling
    assert (body.request.id, body.request.seed, body.request.group) == ("a/0", 5, "a")
    config = RunConfig(buffer=Double(), inflight=Swap())
    body = _carried(wire.Start(factory="a:b", config=config))
    assert isinstance(body, wire.Start)
    assert body.config == config


def test_completion_crosses_with_spans_and_extreme_logprobs():
    sent = Completion(
        tokens=np.array([1, 2], np.int32),
        logprobs=np.array([-np.inf, np.float32(1e-30)], np.float32),
        spans=(Span(0, 0, 1), Span(1, 1, 2)),
        finish_reason="stop",
        text="héllo\0",
    )
    got: Completion = decode(encode(sent), Completion)
    assert got.spans == sent.spans
    assert got.text == sent.text
    assert got.logprobs.tobytes() == sent.logprobs.tobytes()


@given(
    st.sampled_from(["int32", "float32", "bool", "int64", "float64", "uint8", "float16", ">i4"]),
    st.lists(st.integers(0, 3), max_size=3),
)
def test_array_of_any_shape_crosses(dtype: str, shape: list[int]):
    sent = (np.arange(int(np.prod(shape))) % 2).reshape(shape).astype(dtype)
    kind = np.ndarray[tuple[int, ...], np.dtype[np.dtype(dtype).type]]
    got = decode(encode(sent), kind)
    assert got.dtype == sent.dtype.newbyteorder("=")
    assert got.shape == sent.shape
    assert np.array_equal(got, sent)


def test_array_of_another_dtype_is_refused():
    with pytest.raises(msgspec.ValidationError, match="expected a float32 array, got float64 array"):
        decode(encode(np.zeros(3)), Floats)


def test_misaligned_completion_is_refused():
    forged = {
        "tokens": np.zeros(2, np.int32),
        "logprobs": np.zeros(1, np.float32),
        "spans": [],
        "finish_reason": "stop",
    }
    with pytest.raises(msgspec.ValidationError, match="2 tokens but 1 log-probs"):
        decode(encode(forged), Completion)


@pytest.mark.parametrize(
    "data", [b"", b"\0", b"\x63\1", b"\0\1" + struct.pack(">Q", 9), b"\0\1" + struct.pack(">Q", 1) + b"abc"]
)
def test_malformed_array_is_refused(data: bytes):
    with pytest.raises(ValueError, match="array"):
        decode(msgspec.msgpack.encode(msgspec.msgpack.Ext(1, data)), Floats)


def test_object_has_no_place_on_the_wire():
    with pytest.raises(TypeError, match="complex"):
        encode({"x": 1j})
    with pytest.raises(TypeError, match="array of object"):
        encode(np.array([object()]))


@given(st.lists(st.binary(max_size=40), max_size=6), st.integers(1, 50))
def test_frames_come_out_whole_however_they_are_cut(bodies: list[bytes], cut: int):
    stream = b"".join(struct.pack(">Q", len(b)) + b for b in bodies)
    frames, out = rpc.FrameReader(), []
    for at in range(0, len(stream), cut):
        out += frames.feed(stream[at : at + cut])
    assert out == bodies


def test_frame_of_absurd_length_is_refused():
    with pytest.raises(ValueError, match="frame of 18446744073709551615 bytes"):
        rpc.FrameReader().feed(b"\xff" * 8)


def test_frame_larger_than_any_batch_is_waited_for():
    assert rpc.FrameReader().feed(struct.pack(">Q", 64 << 30)) == []


def _tree(kind: type[errors.CorrenteError]) -> list[type[errors.CorrenteError]]:
    ours = [child for child in kind.__subclasses__() if child.__module__ == errors.__name__]
    return [kind, *(leaf for child in ours for leaf in _tree(child))]


@pytest.mark.parametrize("kind", _tree(errors.CorrenteError))
def test_error_of_the_tree_comes_back_as_itself(kind: type[errors.CorrenteError]):
    sent = rpc.failure(3, kind("it is so"), worker="engine")
    answer: rpc.RpcAnswer = decode(encode(sent), rpc.RpcAnswer)
    assert isinstance(answer, rpc.RpcFailure)
    back = rpc.rebuild(answer)
    assert type(back) is kind
    assert str(back) == "it is so"


def test_foreign_error_comes_back_naming_worker_and_class():
    back = rpc.rebuild(rpc.failure(3, ZeroDivisionError("by zero"), worker="learner"))
    assert type(back) is errors.PipelineError
    assert str(back) == "learner failed: ZeroDivisionError: by zero"


@pytest.mark.parametrize("name", ["annotations", "__doc__", "Exception", "os"])
def test_error_name_that_is_no_error_is_not_looked_up(name: str):
    assert type(rpc.rebuild(rpc.RpcFailure(id=0, error=name, message="m"))) is errors.PipelineError


def test_update_crosses():
    body = _carried(wire.Apply(update=Update(version=3, slot=1, nbytes=9), mode="swap"))
    assert isinstance(body, wire.Apply)
    assert body.update == Update(version=3, slot=1, nbytes=9)


OFFERS = [
    offers.SharedOffer(version=3, slot=1, nbytes=9, path="/proc/1/fd/2"),
    offers.DiskOffer(version=3, slot=1, nbytes=9, base=2, path="/weights/v3"),
    offers.HttpOffer(version=3, slot=0, nbytes=9, url="http://[::1]:1/w", token="t", digest="d", deadline_s=0.5),
    offers.CollectiveOffer(
        version=3, slot=0, nbytes=9, host="h", port=1, members=2, generation=4, bucket_bytes=1, digest="d"
    ),
    offers.VllmNcclOffer(
        version=3, slot=0, nbytes=9, host="h", port=1, members=2, generation=4, unique_id="aQ==", bucket_bytes=1
    ),
    offers.CudaIpcOffer(version=3, slot=0, nbytes=9, device=0, handle=bytes(range(256))),
]


@pytest.mark.parametrize("offer", OFFERS, ids=lambda offer: type(offer).__name__)
def test_offer_of_every_kind_crosses_both_ways(offer: offers.Offer):
    body = _carried(wire.Receive(offer=offer))
    assert isinstance(body, wire.Receive)
    assert body.offer == offer
    assert decode(encode(offer), offers.Offer) == offer


def test_offers_are_all_of_them():
    assert {type(offer) for offer in OFFERS} == set(offers.Offer.__args__)


def test_requests_for_offers_cross():
    request = OfferRequest(version=3, slot=1, live=2, whole=False, members=5)
    body = _carried(wire.OfferWeights(request=request))
    assert isinstance(body, wire.OfferWeights)
    assert body.request == request
