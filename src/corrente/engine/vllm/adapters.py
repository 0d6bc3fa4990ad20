"""A vLLM server that keeps its weights and receives adapters: one per version, under a name of its own.

Adapters that arrive in a slot, by any transport, are written as a peft directory, which the server loads while it generates. A
flip changes the name that new requests ask for. It pauses nothing, and live requests finish under the adapter they began with, as
``snapshot`` promises. So ``swap`` and ``recompute`` are refused while there are live requests; the inflight policies drain,
barrier and resume leave none.

A version in use is not unloaded: ``reserve`` waits for the last request that names it. Only then does the server unload it, and
its files, which the server may still read, are removed.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import msgspec

from corrente.adapters.base import Factor
from corrente.config import Lora
from corrente.data.types import ApplyMode, Span
from corrente.engine.vllm.client import ServerError
from corrente.engine.vllm.engine import POLL_S, LiveRequest, VllmEngine
from corrente.errors import GenerationError, SyncError
from corrente.sync.base import Update
from corrente.sync.layout import Layout, Slab, arrange
from corrente.sync.offers import Offer

DIRECTORY = "corrente.adapters.directory"
RECEIVER, SLOTS = "corrente.sync.receiver", "corrente.sync.weight_slots"


class LoadedAdapter(msgspec.Struct, frozen=True):
    """An adapter that the server has loaded."""

    version: int
    name: str
    path: Path


class AdapterEngine(VllmEngine):
    """Implements Engine and Receiver over a server that receives adapters only.

    ``root`` is a folder that the server can read; the peft directories are written to it and removed from it.
    """

    def __init__(
        self,
        *args: Any,
        settings: Lora,
        source: Path,
        root: Path,
        trust_remote_code: bool = False,
        **more: Any,
    ) -> None:
        super().__init__(*args, **more)
        self._settings, self._source, self.adapter_folder = settings, source, root
        self._trust = trust_remote_code
        self._exporter: Any = None
        self._receiver: Any = None
        self._layout = Layout(())
        self._receiving = anyio.Lock()
        self._loaded: dict[int, LoadedAdapter] = {}
        self._count = 0

    async def open(self) -> Layout:
        """See VllmEngine.open; the layout is that of the adapters. ConfigError when the model has no such layers."""
        await self.read_served_model()
        await anyio.to_thread.run_sync(self._prepare_exporter)
        return self._layout

    def _prepare_exporter(self) -> None:
        make = import_module(DIRECTORY).Exporter
        self._exporter = make(self._settings, source=self._source, trust_remote_code=self._trust)
        factors: Mapping[str, Factor] = self._exporter.factors
        self._layout = arrange(
            [
                Slab(name=name, shape=factor.shape, dtype="float32", offset=0, sources=(name,))
                for name, factor in factors.items()
            ]
        )
        self._receiver = import_module(RECEIVER).WeightReceiver(self._layout, adopt=True)

    def model_name(self, update: Update | None) -> str:
        """The name of the adapter of ``update``."""
        assert update is not None
        return self._loaded[update.slot].name

    def version_spans(self, live: LiveRequest, labels: Sequence[Mapping[str, Any]]) -> list[Span]:
        """One span for all tokens: the server's labels are those of its base weights, which do not change."""
        assert live.update is not None
        return [Span(live.update.version, 0, len(live.tokens))] if live.tokens else []

    async def reserve(self, slot: int) -> None:
        """See Receiver.reserve."""
        if self.current_update is not None and slot == self.current_update.slot:
            raise SyncError(f"slot {slot} holds version {self.current_update.version}, which is in use")
        self._receiver.stop()
        while any(live.update is not None and live.update.slot == slot for live in self._live.values()):
            await anyio.sleep(POLL_S)
        async with self._receiving:
            await self._unload_slot(slot)

    async def receive(self, offer: Offer) -> None:
        """See Receiver.receive. The adapter is fetched, written to disk and loaded by the server."""
        async with self._receiving:
            path = await anyio.to_thread.run_sync(self._write_adapter, offer)
            try:
                await self._post_or_sync_error(
                    "/v1/load_lora_adapter", {"lora_name": path.name, "lora_path": str(path)}
                )
            except BaseException:
                shutil.rmtree(path, ignore_errors=True)
                raise
            self._loaded[offer.slot] = LoadedAdapter(offer.version, path.name, path)

    async def apply(self, update: Update, mode: ApplyMode) -> float:
        """See Receiver.apply. It pauses nothing and returns 0."""
        await anyio.lowlevel.checkpoint()
        loaded = self._loaded.get(update.slot)
        if loaded is None or loaded.version != update.version:
            raise SyncError(f"version {update.version} is not in slot {update.slot}")
        if mode != "snapshot" and self._live:
            raise SyncError(
                f"{len(self._live)} requests are live, and vLLM lets them finish under the adapter they began with; "
                "inflight.kind snapshot, drain, barrier or resume is needed"
            )
        self.current_update = update
        return 0.0

    def _write_adapter(self, offer: Offer) -> Path:
        self._receiver.receive(offer)
        tensors = import_module(SLOTS).slab_views(self._layout, self._receiver.slots[offer.slot])
        self._count += 1
        run = f"{self._run_label}-{self._count}"
        return self._exporter.write(self.adapter_folder, tensors, run=run, version=offer.version)

    async def _unload_slot(self, slot: int) -> None:
        loaded = self._loaded.pop(slot, None)
        if loaded is None:
            return
        try:
            await self._post_or_sync_error("/v1/unload_lora_adapter", {"lora_name": loaded.name})
        finally:
            await anyio.to_thread.run_sync(lambda: shutil.rmtree(loaded.path, ignore_errors=True))

    async def _post_or_sync_error(self, path: str, body: dict[str, Any]) -> None:
        try:
            await self.client.post(path, body)
        except (ServerError, GenerationError) as error:
            raise SyncError(f"{self.client.url}: {error}") from error
