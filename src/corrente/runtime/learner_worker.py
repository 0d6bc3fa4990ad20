"""What a learner process does with its calls: one at a time, in order. Nothing happens between them."""

from __future__ import annotations

import time
from pathlib import Path

from corrente.errors import PipelineError, SyncError
from corrente.runtime import wire
from corrente.runtime.cores import LearnerCore, attach, load
from corrente.sync.layout import Layout


class LearnerRole:
    """Serves one LearnerCore, and writes its weights where the engine wants them."""

    busy = False

    def __init__(self) -> None:
        self._core: LearnerCore | None = None
        self._layout = Layout(())
        self._buffers: tuple = ()

    @property
    def core(self) -> LearnerCore:
        if self._core is None:
            raise PipelineError("the learner was called before it was started")
        return self._core

    def work(self) -> list[wire.Answer]:
        return []

    def handle(self, call: wire.Call) -> wire.Answer | None:
        match call.body:
            case wire.Start(factory=factory, config=config):
                self._core = load(factory)(config)
                return wire.reply(call.id, None)
            case wire.Attach(fd=fd, layout=layout):
                self._layout, self._buffers = layout, attach(fd, layout)
                return wire.reply(call.id, None)
            case wire.Step(batch=batch):
                return wire.reply(call.id, {name: float(value) for name, value in self.core.step(batch).items()})
            case wire.Export(slot=slot):
                return wire.reply(call.id, self._export(slot))
            case wire.Save(path=path):
                return wire.reply(call.id, self.core.save(Path(path)))
            case wire.Load(path=path):
                return wire.reply(call.id, self.core.load(Path(path)))
            case wire.Cancel():
                return None
            case _:
                raise PipelineError(f"a learner does not answer {type(call.body).__name__}")

    def _export(self, slot: int) -> float:
        """Write the weights into a slot; returns the seconds it took."""
        start = time.perf_counter()
        try:
            load("corrente.sync.pack:write")(self._layout, self.core.tensors(), self._buffers[slot])
        except SyncError:
            raise
        except Exception as error:
            raise SyncError(f"the learner's weights could not be written: {type(error).__name__}: {error}") from error
        return time.perf_counter() - start
