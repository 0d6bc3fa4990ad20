"""Faults of a simulation, described as data: at which stage, when, and how.

A fault strikes by call number or by chance. Chance is drawn for the key of the call (a request id, a version), never from a
shared stream, so one fault more does not move all the others.
"""

from __future__ import annotations

from collections import Counter
from fnmatch import fnmatchcase
from typing import Literal

import anyio
import msgspec

from corrente.errors import WorkerDied
from corrente.sim.distributions import generator

Stage = Literal[
    "generate",
    "partials",
    "receive",
    "apply",
    "score",
    "step",
    "save",
    "load",
    "export",
    "deliver",
    "flip",
    "prompt",
    "env",
    "sink",
]
Kind = Literal["error", "hang", "slow", "death"]


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """One way for ``stage`` to go wrong.

    error: the call raises. hang: it never returns. slow: it takes ``delay_s`` longer. death: the worker is gone; this call
    and every later one raises WorkerDied. Strikes the calls numbered in ``calls`` (from 0), those whose key matches the
    pattern ``key`` (as file names do: ``*`` is anything), and any other with ``probability``.
    """

    stage: Stage
    kind: Kind = "error"
    calls: tuple[int, ...] = ()
    key: str = ""
    probability: float = 0.0
    delay_s: float = 0.0

    def strikes(self, *, seed: int, key: str, call: int) -> bool:
        if call in self.calls or (self.key and fnmatchcase(key, self.key)):
            return True
        return self.probability > 0 and generator(seed, self.stage, self.kind, key).random() < self.probability


class Chaos:
    """Counts the calls of each stage and lets the faults strike them. Without faults it does nothing, and never waits."""

    def __init__(self, *faults: Fault, seed: int = 0) -> None:
        self._faults = faults
        self._seed = seed
        self._calls: Counter[str] = Counter()
        self._dead: set[str] = set()

    def touches(self, stage: Stage) -> bool:
        """True if any fault is described for ``stage``."""
        return any(fault.stage == stage for fault in self._faults)

    def pick(self, stage: Stage, key: str) -> Fault | None:
        """The first fault that strikes this call of ``stage``; WorkerDied when it is dead already."""
        if stage in self._dead:
            raise WorkerDied(f"the virtual worker of stage {stage!r} is dead")
        call = self._calls[stage]
        self._calls[stage] += 1
        for fault in self._faults:
            if fault.stage == stage and fault.strikes(seed=self._seed, key=key, call=call):
                return fault
        return None

    async def strike(self, stage: Stage, key: str, error: type[Exception]) -> None:
        """Go wrong if it is this call's turn: raise ``error``, or WorkerDied, or wait."""
        fault = self.pick(stage, key)
        if fault is None:
            return
        if fault.kind == "hang":
            await anyio.sleep_forever()
        elif fault.kind == "slow":
            await anyio.sleep(fault.delay_s)
        elif fault.kind == "death":
            self._dead.add(stage)
            raise WorkerDied(f"the virtual worker of stage {stage!r} died at {key!r}")
        else:
            raise error(f"injected fault at stage {stage!r}, {key!r}")
