"""The role of a self-teacher's process: score with the policy of some versions ago, and follow the run.

It holds an engine that generates nothing. Versions are fetched by a thread beside the scoring, and taken up between two calls,
so a score is of one version, which it names.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import msgspec

from corrente.common import rpc
from corrente.common.imports import load_object
from corrente.common.rpc_server import Send
from corrente.config import Embedded, RunConfig
from corrente.config.rewards import SelfTeacherScorer, temperature_of
from corrente.errors import PipelineError
from corrente.runtime import wire
from corrente.runtime.cores import EngineCore
from corrente.sync.offers import Offer


class TeacherRole:
    """Serves one EngineCore as a teacher."""

    requests: Any = wire.Body
    busy = False

    def __init__(self, send: Send) -> None:
        self._send = send
        self._core: EngineCore | None = None
        self._lag, self._temperature = 1, 1.0
        self._receiver: Any = None
        self._fetching = 0

    @property
    def core(self) -> EngineCore:
        if self._core is None:
            raise PipelineError("the self-teacher was called before it was started")
        return self._core

    def work(self) -> list[rpc.RpcAnswer]:
        return []

    def handle(self, call: rpc.RpcCall[wire.Body]) -> rpc.RpcAnswer | None:
        match call.body:
            case wire.Start(factory=factory, config=config, index=index):
                self._core = load_object(factory)(as_teacher(config), index)
                self._lag, self._temperature = terms(config)
                return rpc.reply(call.id, self.core.layout())
            case wire.Attach():
                self._attach(call.body)
                return rpc.reply(call.id, None)
            case wire.Score(tokens=tokens, top=top):
                return rpc.reply(call.id, self.core.score(tokens, top, temperature=self._temperature))
            case wire.Stats():
                return rpc.reply(call.id, self.core.stats())
            case wire.Reserve():
                return rpc.reply(call.id, None)  # what is written to is never what is used
            case wire.Receive(offer=offer):
                self._fetching = call.id
                threading.Thread(target=self._receive, args=(call.id, offer), name="receive", daemon=True).start()
                return None
            case wire.Apply(update=update):
                began = time.perf_counter()
                self.core.apply(self._receiver.use(update), "swap")
                return rpc.reply(call.id, time.perf_counter() - began)
            case rpc.CancelCall(call=number):
                if number == self._fetching:
                    self._receiver.stop()
                return None
            case _:
                raise PipelineError(f"a self-teacher does not answer {type(call.body).__name__}")

    def close(self) -> None:
        """See Role. Nothing outlives the process."""

    def _attach(self, attach: wire.Attach) -> None:
        from corrente.sync.lagged_receiver import LaggedReceiver
        from corrente.sync.weight_slots import map_slots

        shared: Any = ()
        if attach.fd is not None or attach.path:
            shared = map_slots(attach.layout, fd=attach.fd, path=attach.path)
        self._receiver = LaggedReceiver(attach.layout, lag=self._lag, shared=shared, device=self.core.device)
        self.core.attach_buffers(self._receiver.slots)

    def _receive(self, number: int, offer: Offer) -> None:
        try:
            self._receiver.receive(offer)
            answer: rpc.RpcAnswer = rpc.reply(number, None)
        except Exception as error:
            answer = rpc.failure(number, error, worker="self-teacher")
        self._send(answer)


def self_teacher(config: RunConfig) -> SelfTeacherScorer | None:
    """The table of reward.scorers that asks for one; algo/distill_checks.py sees to it that there is at most one."""
    return next((scorer for scorer in config.reward.scorers if isinstance(scorer, SelfTeacherScorer)), None)


def terms(config: RunConfig) -> tuple[int, float]:
    """Versions that the self-teacher is behind, and the temperature at which it is read."""
    scorer = self_teacher(config)
    assert scorer is not None
    return scorer.lag, temperature_of(scorer, sampling=config.sampling.temperature)


def as_teacher(config: RunConfig) -> RunConfig:
    """The config of an engine that only scores: it needs no room for sequences."""
    if not isinstance(config.engine, Embedded):
        return config
    return msgspec.structs.replace(config, engine=msgspec.structs.replace(config.engine, max_sequences=1))
