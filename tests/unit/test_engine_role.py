"""What an engine process does with its calls, without the process: waits that end later, fetches beside the steps."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from corrente import errors
from corrente.common import rpc
from corrente.common.serialization import decode
from corrente.config import Collective, Disk, Run, RunConfig
from corrente.data.types import Batch, Completion, Request, Sampling, Scores
from corrente.runtime import wire
from corrente.runtime.engine_worker import EngineRole
from corrente.runtime.learner_worker import LearnerRole
from corrente.sync.base import OfferRequest, Update
from corrente.sync.layout import Layout
from corrente.sync.offers import DiskOffer

PATIENCE_S = 20


class Desk:
    """Asks a role, and keeps what it answers by itself."""

    def __init__(self, make: type[EngineRole] | type[LearnerRole]) -> None:
        self.said: queue.SimpleQueue[rpc.RpcAnswer] = queue.SimpleQueue()
        self.role = make(self.said.put)
        self.number = 0

    def ask(self, body: wire.Body) -> rpc.RpcAnswer | None:
        self.number += 1
        return self.role.handle(rpc.RpcCall(self.number, body))

    def get(self, body: wire.Body, kind: object) -> object:
        answer = self.ask(body)
        assert isinstance(answer, rpc.RpcReply)
        return decode(answer.value, kind)

    def heard(self) -> rpc.RpcAnswer:
        return self.said.get(timeout=PATIENCE_S)


@pytest.fixture
def desks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[tuple[Desk, Desk]]:
    """An engine and a learner with weights of one kind, which go through a folder."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "e2e")
    config = RunConfig(sync=Disk(path=str(tmp_path)), run=Run(dir=str(tmp_path)))
    engine, learner = Desk(EngineRole), Desk(LearnerRole)
    layout = engine.get(wire.Start(factory="one_weight_cores:engine", config=config), Layout)
    assert isinstance(layout, Layout)
    learner.get(wire.Start(factory="one_weight_cores:learner", config=config), None)
    for desk in (engine, learner):
        desk.get(wire.Attach(layout=layout), None)
    yield engine, learner
    learner.role.sender.close()


def _offer(learner: Desk, version: int, slot: int) -> DiskOffer:
    learner.get(wire.Export(version=version, slot=slot), float)
    answer = _offered(learner, version, slot)
    assert isinstance(answer, rpc.RpcReply)
    offer = decode(answer.value, DiskOffer)
    assert isinstance(offer, DiskOffer)
    return offer


def _offered(learner: Desk, version: int, slot: int) -> rpc.RpcAnswer:
    """The answer to an offer, which is made in a thread beside those that ``handle`` is called in."""
    learner.number += 1
    request = wire.OfferWeights(request=OfferRequest(version=version, slot=slot))
    assert learner.role.start_concurrently(rpc.RpcCall(learner.number, request))
    answer = learner.heard()
    assert answer.id == learner.number
    return answer


def _publish(engine: Desk, learner: Desk, version: int) -> None:
    learner.ask(wire.StepRpc(batch=Batch(step=0, version=0, rows=(), sequences=0, tokens=0)))
    assert engine.ask(wire.Receive(offer=_offer(learner, version, version % 2))) is None
    assert isinstance(engine.heard(), rpc.RpcReply)
    engine.get(wire.Apply(update=Update(version=version, slot=version % 2), mode="swap"), float)


def _request(name: str) -> wire.Generate:
    return wire.Generate(request=Request(id=name, tokens=np.array([1], np.int32), sampling=Sampling(max_tokens=10**6)))


def test_fetching_answers_when_it_is_done_and_applying_needs_what_was_fetched(desks: tuple[Desk, Desk]):
    engine, learner = desks
    with pytest.raises(errors.SyncError, match="version 0 is not in slot 0"):
        engine.ask(wire.Apply(update=Update(version=0, slot=0), mode="swap"))
    _publish(engine, learner, 0)
    _publish(engine, learner, 1)
    scores = engine.get(wire.Score(tokens=np.arange(3, dtype=np.int32), top=2), Scores)
    assert isinstance(scores, Scores)
    assert scores.logprobs.tolist() == [2.0, 2.0]
    assert scores.top_ids.shape == (2, 2)
    with pytest.raises(errors.SyncError, match="version 0 is not in slot 1"):
        engine.ask(wire.Apply(update=Update(version=0, slot=1), mode="swap"))


def test_slot_in_use_is_not_reserved_and_a_free_one_at_once(desks: tuple[Desk, Desk]):
    engine, learner = desks
    _publish(engine, learner, 0)
    with pytest.raises(errors.SyncError, match="slot 0 holds version 0, which the engine uses"):
        engine.ask(wire.Reserve(slot=0))
    assert engine.ask(wire.Reserve(slot=1)) is None
    (answer,) = engine.role.work()
    assert isinstance(answer, rpc.RpcReply)
    assert answer.id == engine.number


def test_slot_is_reserved_once_no_live_sequence_samples_from_it(desks: tuple[Desk, Desk]):
    engine, learner = desks
    _publish(engine, learner, 0)
    taken = True
    engine.role.core.is_slot_free = lambda slot: not taken  # pyright: ignore
    engine.ask(wire.Reserve(slot=1))
    reserving = engine.number
    engine.ask(_request("a"))
    assert engine.role.work() == []
    engine.ask(wire.Reserve(slot=1))
    engine.ask(rpc.CancelCall(call=engine.number))
    taken = False
    assert [answer.id for answer in engine.role.work()] == [reserving]
    assert engine.role.work() == []


def test_partials_go_by_the_requests_own_ids(desks: tuple[Desk, Desk]):
    engine, learner = desks
    _publish(engine, learner, 0)
    for name in "ab":
        engine.ask(_request(name))
    engine.role.work()
    found = engine.get(wire.Partials(ids=("b", "nobody")), dict[str, Completion])
    assert isinstance(found, dict)
    assert set(found) == {"b"}
    assert found["b"].tokens.tolist() == [1]
    engine.role.work()
    assert len(engine.get(wire.Partials(ids=("a",)), dict[str, Completion])["a"].tokens) == 2  # pyright: ignore


def test_decoding_goes_on_while_a_fetch_waits_and_a_cancelled_fetch_ends(desks: tuple[Desk, Desk], tmp_path: Path):
    """The offer is a broadcast to two, and the other never comes."""
    engine, learner = desks
    _publish(engine, learner, 0)
    from corrente.sync import sender

    config = RunConfig(sync=Collective(), run=Run(dir=str(tmp_path)))
    lonely = sender.build(config, engine.role.core.layout())
    lonely.export(1, learner.role.core.tensors(), slot=1)
    offer = lonely.offer(OfferRequest(version=1, slot=1, members=2))
    assert engine.ask(wire.Receive(offer=offer)) is None
    receiving = engine.number
    engine.ask(_request("a"))
    for _ in range(5):
        engine.role.work()
    assert len(engine.get(wire.Partials(ids=("a",)), dict[str, Completion])["a"].tokens) == 5  # pyright: ignore
    assert engine.said.empty()
    engine.ask(rpc.CancelCall(call=receiving))
    answer = engine.heard()
    assert isinstance(answer, rpc.RpcFailure)
    assert (answer.id, answer.error) == (receiving, "SyncError")
    with pytest.raises(errors.SyncError, match="not in slot 1"):
        engine.ask(wire.Apply(update=Update(version=1, slot=1), mode="swap"))
    lonely.close()
    _publish(engine, learner, 1)


def test_learner_that_cannot_send_says_so_and_goes_on(desks: tuple[Desk, Desk]):
    _, learner = desks
    answer = _offered(learner, 5, 0)
    assert isinstance(answer, rpc.RpcFailure)
    assert answer.error == "SyncError"
    assert "version 5 is not kept any more" in answer.message
    learner.role.core.torn = True  # pyright: ignore
    with pytest.raises(errors.SyncError, match="could not be sent: MemoryError: no room for a copy"):
        learner.ask(wire.Export(version=0, slot=0))
    assert _offer(learner, 0, 0).version == 0


def test_engine_with_one_slot_stands_still_from_the_reservation_to_the_flip(desks: tuple[Desk, Desk]):
    """Requests wait and live sequences stay as they are; the next token is of the next version."""
    engine, learner = desks
    layout = engine.role.core.layout()
    engine.get(wire.Attach(layout=layout, slots=1), None)
    paused = []
    engine.role.core.pause = lambda: paused.append(True)  # pyright: ignore
    learner.get(wire.Export(version=0, slot=0), float)
    for version in range(2):
        answer = engine.ask(wire.Reserve(slot=0))
        assert isinstance(answer, rpc.RpcReply)
        assert len(paused) == version + 1
        learner.ask(wire.StepRpc(batch=Batch(step=0, version=0, rows=(), sequences=0, tokens=0)))
        assert engine.ask(wire.Receive(offer=_offer(learner, version, 0))) is None
        assert isinstance(engine.heard(), rpc.RpcReply)
        engine.get(wire.Apply(update=Update(version=version, slot=0), mode="swap"), float)
    engine.ask(rpc.CancelCall(call=engine.number))
    scores = engine.get(wire.Score(tokens=np.arange(3, dtype=np.int32)), Scores)
    assert scores.logprobs.tolist() == [2.0, 2.0]  # pyright: ignore
