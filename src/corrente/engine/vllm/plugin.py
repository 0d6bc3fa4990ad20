"""Code that runs inside vLLM's worker: a weight-transfer engine named "corrente", and calls that inspect and stop it.

    vllm serve ... --weight-transfer-config '{"backend": "corrente"}'
                   --worker-extension-cls corrente.engine.vllm.plugin.Extension

An update has two parts, each a session of vLLM's own interface (start, update, finish). "receive" starts a thread that fetches a
version into the spare slot and prepares it, and returns at once, so requests go on. "install" flips; it is called while the
scheduler is paused, and is short. ``corrente_status`` reports the state of the thread.

The interpreter is that of vLLM's environment: the modules of corrente that are imported here need only msgspec, numpy and torch.
"""

# pyright: reportMissingImports=false, reportUntypedBaseClass=false
from __future__ import annotations

import contextlib
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from vllm.config import CompilationMode
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from corrente.engine.vllm.weights import VllmWeights
from corrente.errors import SyncError
from corrente.sync.offers import Offer
from corrente.sync.receiver import WeightReceiver
from corrente.sync.weight_slots import allocate_slots

BACKEND = "corrente"
NICE = 5
"""The nice value of the receiving thread, so that the decoding threads get the cores first."""


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Has no fields: an offer contains everything that a transfer needs."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """``receive``: an offer (sync.offers.Offer) as plain data. ``install``: the slot to sample from now on, which
    holds ``version``."""

    receive: dict[str, Any] | None = None
    install: int | None = None
    version: int = -1


class CorrenteEngine(WeightTransferEngine):
    """Receives versions into the slot that is not in use, and flips."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self.weights = VllmWeights(
            model,
            folder=Path(vllm_config.model_config.model),
            dtype=vllm_config.model_config.dtype,
            compiled=vllm_config.compilation_config.mode != CompilationMode.NONE,
        )
        layout, on_host = self.weights.layout, device.type == "cpu"
        own = None if on_host else allocate_slots(layout, device=device)
        self._receiver = WeightReceiver(layout, own, adopt=True)
        self._thread: threading.Thread | None = None
        self._failure = ""
        self._seconds = 0.0

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Do nothing: there is no connection to set up."""

    def start_weight_update(self) -> None:
        """Do nothing: the running model does not change before ``install``."""

    def finish_weight_update(self) -> None:
        """Do nothing: ``receive_weights`` has done everything."""

    def receive_weights(self, update_info: UpdateInfo) -> None:
        if self._busy:
            raise SyncError("a version is still being received")
        if update_info.receive is not None:
            offer = msgspec.convert(update_info.receive, Offer)
            self._failure = ""
            self._thread = threading.Thread(
                target=self._receive_in_thread, args=(offer,), name="corrente-receive", daemon=True
            )
            self._thread.start()
        elif update_info.install is not None:
            self.weights.install_slot(update_info.install, update_info.version)

    def status(self) -> dict[str, Any]:
        """The state of the thread: busy, the failure of the last version or an empty text, and the seconds it took."""
        return {"busy": self._busy, "failure": self._failure, "seconds": self._seconds}

    def stop(self) -> None:
        """Stop up the version that is being received; ``status`` says when."""
        self._receiver.stop()

    def shutdown(self) -> None:
        self._receiver.stop()

    @property
    def _busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _receive_in_thread(self, offer: Offer) -> None:
        """Fetch, then prepare, in the thread. An exception becomes the failure in ``status``."""
        _lower_thread_priority()
        started = time.perf_counter()
        try:
            self.weights.discard_slot(offer.slot)
            self._receiver.receive(offer)
            self.weights.prepare_slot(offer.slot, offer.version, self._receiver.slots[offer.slot])
        except Exception as error:
            self._failure = str(error) if isinstance(error, SyncError) else f"{type(error).__name__}: {error}"
        self._seconds = time.perf_counter() - started


def _lower_thread_priority() -> None:
    """Let the calling thread run on every core, at a lower priority than the decoding threads."""
    # vLLM pins its threads to cores, and a new thread inherits that; without this it would share a decoding thread's core.
    identity = threading.get_native_id()
    with contextlib.suppress(OSError):
        os.sched_setaffinity(identity, range(os.cpu_count() or 1))
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, identity, NICE)


class Extension:
    """Methods added to vLLM's worker, for calls through /collective_rpc."""

    weight_transfer_engine: Any

    def corrente_layout(self) -> dict[str, Any]:
        """The layout in which the learner writes weights, as plain data; see sync/layout.py."""
        return msgspec.to_builtins(self.weight_transfer_engine.weights.layout)

    def corrente_status(self) -> dict[str, Any]:
        """See CorrenteEngine.status."""
        return self.weight_transfer_engine.status()

    def corrente_stop(self) -> None:
        """See CorrenteEngine.stop."""
        self.weight_transfer_engine.stop()


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, CorrenteEngine)
