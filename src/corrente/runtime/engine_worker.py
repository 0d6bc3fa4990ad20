"""The role of an engine process: submit requests, step, answer; and flip between two steps.

Weights are fetched by a thread of its own beside the steps, one version at a time.

The core knows a request by the number of its call, so that a request may be cancelled and sent again under the same id while
the core still ends the first. Answers of a step go out when the step is done.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from corrente.common import rpc
from corrente.common.imports import load_object
from corrente.common.rpc_server import Send
from corrente.data.types import Completion
from corrente.errors import GenerationError, PipelineError, SyncError
from corrente.runtime import wire
from corrente.runtime.cores import EngineCore
from corrente.sync.base import Update


class EngineRole:
    """Serves one EngineCore."""

    requests: Any = wire.Body

    def __init__(self, send: Send) -> None:
        self._send = send
        self._core: EngineCore | None = None
        self._receiver: Any = None
        self._slots = 2
        self._fetching = 0
        self._reserving: list[tuple[int, int]] = []
        self._requests: dict[str, str] = {}
        self._live: Update | None = None
        self._flip: tuple[int, Update | None] = (0, None)

    @property
    def busy(self) -> bool:
        return self._core is not None and not self._core.idle

    @property
    def core(self) -> EngineCore:
        if self._core is None:
            raise PipelineError("the engine was called before it was started")
        return self._core

    def work(self) -> list[rpc.RpcAnswer]:
        """One decode step, and answers for the calls that it finished and somebody still waits for."""
        finished: list[rpc.RpcAnswer] = []
        if self.busy:
            outcomes = self.core.step()
            waited = [(name, outcome) for name, outcome in outcomes if self._requests.pop(name, None) is not None]
            finished = [_answer(int(name), outcome) for name, outcome in waited]
        return finished + self._reserved()

    def handle(self, call: rpc.RpcCall[wire.Body]) -> rpc.RpcAnswer | None:
        match call.body:
            case wire.Start(factory=factory, config=config, index=index):
                self._core = load_object(factory)(config, index)
                return rpc.reply(call.id, self.core.layout())
            case wire.Attach():
                self._attach(call.body)
                return rpc.reply(call.id, None)
            case wire.Generate(request=request):
                self.core.submit(msgspec.structs.replace(request, id=str(call.id)))
                self._requests[str(call.id)] = request.id
                return None
            case wire.Abort(ids=ids):
                self.core.abort(self._named(ids))
                return rpc.reply(call.id, None)
            case wire.Partials(ids=ids):
                found = self.core.partial_completions(self._named(ids))
                return rpc.reply(call.id, {self._requests[name]: partial for name, partial in found.items()})
            case wire.Score(tokens=tokens, top=top):
                return rpc.reply(call.id, self.core.score(tokens, top))
            case wire.Stats():
                return rpc.reply(call.id, self.core.stats())
            case wire.Reserve() | wire.Receive() | wire.Apply():
                return self._weights(call.id, call.body)
            case rpc.CancelCall(call=number):
                return self._cancel(number)
            case _:
                raise PipelineError(f"an engine does not answer {type(call.body).__name__}")

    def close(self) -> None:
        """See Role. Nothing outlives the process."""

    def _named(self, ids: Sequence[str]) -> list[str]:
        """Names that the core has for requests which the controller knows by these ids."""
        return [name for name, request in self._requests.items() if request in ids]

    # ---- weights

    def _attach(self, attach: wire.Attach) -> None:
        """Take the slots that all sides share, where there are any and the engine computes there; else make its own, on its
        device, into which versions are brought."""
        shared = self.core.device == "cpu" and (attach.fd is not None or bool(attach.path))
        slots: Sequence[Any] = ()
        if attach.layout.slabs:
            from corrente.sync.receiver import WeightReceiver
            from corrente.sync.weight_slots import allocate_slots, map_slots

            if shared:
                slots = map_slots(attach.layout, fd=attach.fd, path=attach.path, count=attach.slots)
            else:
                slots = allocate_slots(attach.layout, device=self.core.device, count=attach.slots)
            self._receiver = WeightReceiver(attach.layout, slots, shared=shared)
        self._slots = attach.slots
        self.core.attach_buffers(slots)

    def _weights(self, number: int, body: wire.Reserve | wire.Receive | wire.Apply) -> rpc.RpcAnswer | None:
        match body:
            case wire.Reserve(slot=slot):
                if self._slots == 1:
                    self.core.pause()
                    return rpc.reply(number, None)
                if self._live is not None and self._live.slot == slot:
                    raise SyncError(f"slot {slot} holds version {self._live.version}, which the engine uses")
                self._reserving.append((number, slot))
            case wire.Receive():
                self._fetching = number
                threading.Thread(target=self._receive, args=(number, body), name="receive", daemon=True).start()
            case wire.Apply():
                return rpc.reply(number, self._apply(number, body))
        return None

    def _reserved(self) -> list[rpc.RpcAnswer]:
        """Answers for those who waited for a slot that nobody samples from any more."""
        free = [entry for entry in self._reserving if self.core.is_slot_free(entry[1])]
        self._reserving = [entry for entry in self._reserving if entry not in free]
        return [rpc.reply(number, None) for number, _ in free]

    def _receive(self, number: int, body: wire.Receive) -> None:
        """Fetch in this thread, and answer. An engine without weights has received all it needs."""
        try:
            if self._receiver is not None:
                self._receiver.receive(body.offer)
            answer = rpc.reply(number, None)
        except Exception as error:
            answer = rpc.failure(number, error, worker="engine")
        self._send(answer)

    def _apply(self, number: int, flip: wire.Apply) -> float:
        """Flip, and time it: the engine cannot decode meanwhile. The core flips as a whole or not at all."""
        update = flip.update
        if self._receiver is not None and self._receiver.holds(update.slot) != update.version:
            raise SyncError(f"version {update.version} is not in slot {update.slot} of the engine")
        start = time.perf_counter()
        try:
            self.core.apply(update, flip.mode)
        except SyncError:
            raise
        except Exception as error:
            raise SyncError(f"the engine kept its weights: {type(error).__name__}: {error}") from error
        self._flip, self._live = (number, self._live), update
        return time.perf_counter() - start

    def _cancel(self, number: int) -> None:
        """End what nobody waits for: a generation, a wait, a fetch. A flip is taken back, if there is a way back."""
        self._reserving = [entry for entry in self._reserving if entry[0] != number]
        if number == self._fetching and self._receiver is not None:
            self._receiver.stop()
        if self._requests.pop(str(number), None) is not None:
            self.core.abort([str(number)])
        flip, before = self._flip
        if number == flip and before is not None and self._slots > 1:  # one slot has nothing to go back to
            self.core.apply(before, "swap")
            self._flip, self._live = (0, None), before


def _answer(call: int, outcome: Completion | GenerationError) -> rpc.RpcAnswer:
    if isinstance(outcome, GenerationError):
        return rpc.failure(call, outcome, worker="engine")
    return rpc.reply(call, outcome)
