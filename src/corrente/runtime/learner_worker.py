"""The role of a learner process: calls are served one at a time, in order. Only offers of exported weights are made
concurrently."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from corrente.common import rpc
from corrente.common.imports import load_object
from corrente.common.rpc_server import Send
from corrente.config import RunConfig
from corrente.errors import PipelineError, SyncError
from corrente.models import devices
from corrente.runtime import wire
from corrente.runtime.cores import LearnerCore
from corrente.sync.base import OfferRequest

T = TypeVar("T")

OFFER_NICE = 5
"""How much the thread that offers weights gives way to the one that trains: checksums and files wait for a step's kernels."""


class LearnerRole:
    """Serves one LearnerCore, and writes its weights where the engine wants them."""

    requests: Any = wire.Body
    busy = False

    def __init__(self, send: Send) -> None:
        self._send = send
        self._core: LearnerCore | None = None
        self._config = RunConfig()
        self.sender: Any = None
        self._offering = 0

    @property
    def core(self) -> LearnerCore:
        if self._core is None:
            raise PipelineError("the learner was called before it was started")
        return self._core

    def work(self) -> list[rpc.RpcAnswer]:
        return []

    def start_concurrently(self, call: rpc.RpcCall[wire.Body]) -> bool:
        """Make offers in a thread of their own, so that no delivery waits for a step."""
        match call.body:
            case wire.OfferWeights(request=request):
                self._offering = call.id
                threading.Thread(target=self._offer, args=(call.id, request), name="offer", daemon=True).start()
                return True
            case rpc.CancelCall(call=number) if number == self._offering:
                self.sender.stop()
                return True
            case _:
                return False

    def handle(self, call: rpc.RpcCall[wire.Body]) -> rpc.RpcAnswer | None:
        match call.body:
            case wire.Start(factory=factory, config=config):
                self._core, self._config = load_object(factory)(config), config
                return rpc.reply(call.id, None)
            case wire.Attach():
                self._attach(call.body)
                return rpc.reply(call.id, None)
            case wire.StepRpc(batch=batch):
                values = self.core.step(batch, pulse=lambda: self._send(rpc.RpcProgress(id=call.id)))
                return rpc.reply(call.id, {name: float(value) for name, value in values.items()})
            case wire.Export(version=version, slot=slot):
                return rpc.reply(call.id, _as_sync_error(lambda: self._export(version, slot)))
            case wire.Save(path=path):
                return rpc.reply(call.id, self.core.save(Path(path)))
            case wire.Load(path=path):
                return rpc.reply(call.id, self.core.load(Path(path)))
            case rpc.CancelCall():
                return None
            case _:
                raise PipelineError(f"a learner does not answer {type(call.body).__name__}")

    def close(self) -> None:
        """See Role. Nothing outlives the process."""

    def _attach(self, attach: wire.Attach) -> None:
        """Get ready to send weights in that layout, by the transport of the config; an engine without weights needs none."""
        if not attach.layout.slabs:
            return
        from corrente.sync.sender import build
        from corrente.sync.weight_slots import map_slots

        shared = None
        if attach.fd is not None:
            shared = map_slots(attach.layout, fd=attach.fd, count=attach.slots)
        device = devices.learner_device(self._config.model.device)
        self.sender = build(
            self._config, attach.layout, shared=shared, path=attach.path, device=device, slots=attach.slots
        )

    def _export(self, version: int, slot: int) -> float:
        return self.sender.export(version, self.core.tensors(), slot=slot)

    def _offer(self, number: int, request: OfferRequest) -> None:
        """Offer in this thread, and answer. It runs behind the thread that trains, and so do those it starts."""
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), OFFER_NICE)
        try:
            answer: rpc.RpcAnswer = rpc.reply(number, _as_sync_error(lambda: self.sender.offer(request)))
        except SyncError as error:
            answer = rpc.failure(number, error, worker="learner")
        self._send(answer)


def _as_sync_error(work: Callable[[], T]) -> T:
    """Whatever goes wrong while weights are sent costs that publish, and not the learner."""
    try:
        return work()
    except SyncError:
        raise
    except Exception as error:
        raise SyncError(f"the learner's weights could not be sent: {type(error).__name__}: {error}") from error
