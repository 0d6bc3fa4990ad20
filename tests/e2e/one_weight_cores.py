"""Stand-in cores with one weight, which the learner raises by 1 at every step: what is served tells which publish it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import fake_cores
import torch

from corrente.config import RunConfig
from corrente.data.types import ApplyMode, Batch, Request
from corrente.errors import GenerationError
from corrente.learner.base import Pulse, no_pulse
from corrente.sync.base import Update
from corrente.sync.layout import Layout, Slab, arrange

SIZE = 1000
HELD = -9
"""A step that ends when whoever has the pipe HOLD in run.dir open for writing closes it."""
HOLD = "hold"
UNWELCOME = 99
"""A version the engine refuses to flip to."""


class Engine(fake_cores.Engine):
    def __init__(self) -> None:
        super().__init__()
        self.buffers: Sequence[torch.Tensor] = ()
        self.update = Update(version=-1, slot=0)

    def layout(self) -> Layout:
        return arrange([Slab(name="w", shape=(SIZE,), dtype="float32", offset=0, sources=("w",))])

    def attach_buffers(self, buffers: Sequence[torch.Tensor]) -> None:
        self.buffers = buffers

    def apply(self, update: Update, mode: ApplyMode) -> None:
        if update.version == UNWELCOME:
            raise RuntimeError("this one will not do")
        self.update = update

    def submit(self, request: Request) -> None:
        if self.update.version < 0:
            raise GenerationError("no weights")
        super().submit(request)

    @property
    def value(self) -> float:
        return float(self.buffers[self.update.slot].view(torch.float32)[-1])


class Learner(fake_cores.Learner):
    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.weight = torch.zeros(SIZE)
        self.torn = False

    def step(self, batch: Batch, *, pulse: Pulse = no_pulse) -> dict[str, float]:
        self.torn = batch.step == fake_cores.TORN
        if batch.step == HELD:
            (self.folder / HOLD).read_bytes()
        self.weight += 1
        return {"weight": float(self.weight[0])}

    def tensors(self) -> Mapping[str, torch.Tensor]:
        if self.torn:
            self.torn = False
            raise MemoryError("no room for a copy")
        return {"w": self.weight}


def engine(config: RunConfig, index: int = 0) -> Engine:
    return Engine()


def learner(config: RunConfig) -> Learner:
    return Learner(Path(config.run.dir))


class Apart(Engine):
    """Computes on a device of its own, as far as anybody who gives it buffers can tell."""

    device = "cpu:0"


def apart(config: RunConfig, index: int) -> Apart:
    """Leaves its turn among the GPUs in run.dir."""
    (Path(config.run.dir) / f"turn-{index}").touch()
    return Apart()
