"""What an engine process does with its calls: submit, step, answer; and flip between two steps.

The core knows a request by the number of its call, so that a request may be cancelled and sent again under the same id while
the core still ends the first. Answers of a step go out when the step is done.
"""

from __future__ import annotations

import time

import msgspec

from corrente.errors import GenerationError, PipelineError, SyncError
from corrente.runtime import wire
from corrente.runtime.cores import EngineCore, attach, load
from corrente.sync.base import Update
from corrente.types import Completion


class EngineRole:
    """Serves one EngineCore."""

    def __init__(self) -> None:
        self._core: EngineCore | None = None
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

    def work(self) -> list[wire.Answer]:
        """One decode step, and answers for the calls that it finished and somebody still waits for."""
        if not self.busy:
            return []
        finished = [(name, outcome) for name, outcome in self.core.step() if self._requests.pop(name, None) is not None]
        return [_answer(int(name), outcome) for name, outcome in finished]

    def handle(self, call: wire.Call) -> wire.Answer | None:
        match call.body:
            case wire.Start(factory=factory, config=config):
                self._core = load(factory)(config)
                return wire.reply(call.id, self.core.layout())
            case wire.Attach(fd=fd, layout=layout):
                self.core.attach(attach(fd, layout))
                return wire.reply(call.id, None)
            case wire.Generate(request=request):
                self.core.submit(msgspec.structs.replace(request, id=str(call.id)))
                self._requests[str(call.id)] = request.id
                return None
            case wire.Abort(ids=ids):
                self.core.abort([name for name, request in self._requests.items() if request in ids])
                return wire.reply(call.id, None)
            case wire.Score(tokens=tokens):
                return wire.reply(call.id, self.core.score(tokens))
            case wire.Stats():
                return wire.reply(call.id, self.core.stats())
            case wire.Apply():
                return wire.reply(call.id, self._apply(call.id, call.body))
            case wire.Cancel(call=number):
                return self._cancel(number)
            case _:
                raise PipelineError(f"an engine does not answer {type(call.body).__name__}")

    def _apply(self, number: int, flip: wire.Apply) -> float:
        """Flip, and time it: the engine cannot decode meanwhile. The core flips as a whole or not at all."""
        start = time.perf_counter()
        try:
            self.core.apply(flip.update, flip.mode)
        except SyncError:
            raise
        except Exception as error:
            raise SyncError(f"the engine kept its weights: {type(error).__name__}: {error}") from error
        self._flip, self._live = (number, self._live), flip.update
        return time.perf_counter() - start

    def _cancel(self, number: int) -> None:
        """End a generation nobody waits for; take back a flip whose caller was cancelled, if there is a way back."""
        if self._requests.pop(str(number), None) is not None:
            self.core.abort([str(number)])
        flip, before = self._flip
        if number == flip and before is not None:
            self.core.apply(before, "swap")
            self._flip, self._live = (0, None), before


def _answer(call: int, outcome: Completion | GenerationError) -> wire.Answer:
    if isinstance(outcome, GenerationError):
        return wire.failure(call, outcome, worker="engine")
    return wire.reply(call, outcome)
