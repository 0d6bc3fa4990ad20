"""What a learner process does with its calls: one at a time, in order. Nothing happens between them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from corrente.common.imports import load_object
from corrente.config import RunConfig
from corrente.errors import PipelineError, SyncError
from corrente.models import devices
from corrente.runtime import wire
from corrente.runtime.cores import LearnerCore, attach
from corrente.runtime.serving import Send

T = TypeVar("T")


class LearnerRole:
    """Serves one LearnerCore, and writes its weights where the engine wants them."""

    busy = False

    def __init__(self, send: Send) -> None:
        self._send = send
        self._core: LearnerCore | None = None
        self._config = RunConfig()
        self._outbox: Any = None

    @property
    def core(self) -> LearnerCore:
        if self._core is None:
            raise PipelineError("the learner was called before it was started")
        return self._core

    def work(self) -> list[wire.Answer]:
        return []

    def handle(self, call: wire.Rpc) -> wire.Answer | None:
        match call.body:
            case wire.Start(factory=factory, config=config):
                self._core, self._config = load_object(factory)(config), config
                return wire.reply(call.id, None)
            case wire.Attach():
                self._attach(call.body)
                return wire.reply(call.id, None)
            case wire.StepRpc(batch=batch):
                values = self.core.step(batch, pulse=lambda: self._send(wire.Going(id=call.id)))
                return wire.reply(call.id, {name: float(value) for name, value in values.items()})
            case wire.Export(order=order):
                return wire.reply(call.id, _as_sync_error(lambda: self._outbox.export(order, self.core.tensors())))
            case wire.Again(order=order):
                return wire.reply(call.id, _as_sync_error(lambda: self._outbox.again(order)))
            case wire.Save(path=path):
                return wire.reply(call.id, self.core.save(Path(path)))
            case wire.Load(path=path):
                return wire.reply(call.id, self.core.load(Path(path)))
            case wire.CancelRpc():
                return None
            case _:
                raise PipelineError(f"a learner does not answer {type(call.body).__name__}")

    def _attach(self, given: wire.Attach) -> None:
        """Get ready to send weights in that layout, by the transport of the config; an engine without weights needs none."""
        if not given.layout.slabs:
            return
        shared = attach(given.layout, fd=given.fd) if given.fd is not None else None
        build = load_object("corrente.sync.outbox:build")
        device = devices.learner_device(self._config.model.device)
        self._outbox = build(self._config, given.layout, shared=shared, path=given.path, device=device)


def _as_sync_error(work: Callable[[], T]) -> T:
    """Whatever goes wrong while weights are sent costs that publish, and not the learner."""
    try:
        return work()
    except SyncError:
        raise
    except Exception as error:
        raise SyncError(f"the learner's weights could not be sent: {type(error).__name__}: {error}") from error
