"""Numbers of a step that need the engine's answer, fetched beside the loop so that the learner never waits for them."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager

import msgspec
from anyio.streams.memory import MemoryObjectReceiveStream

from corrente.controller.journal import FLIP_WAIT, GROUPS_WAIT, SLOT_WAIT
from corrente.controller.parts import Parts
from corrente.controller.run_state import RunState
from corrente.engine.base import EngineStats
from corrente.errors import PipelineError

Report = tuple[int, int, dict[str, float]]
"""Step, the learner's version after it, and the numbers that are known already."""

WAITS = {
    "wait/learner_groups_fraction": GROUPS_WAIT,
    "wait/learner_publish_fraction": FLIP_WAIT,
    "wait/feed_slot_fraction": SLOT_WAIT,
}


class Reporter:
    """Turns running totals into per-step rates. Idle fractions are of the time since the report before."""

    def __init__(self, parts: Parts, state: RunState) -> None:
        self._engine, self._scorer = parts.engine, parts.scorer
        self._buffer, self._sync = parts.buffer, parts.sync
        self._state, self._journal = state, state.journal
        self._warned = set[str]()
        self._before = EngineStats(version=-1)
        self._before_s = state.journal.elapsed_s
        self._waited_s = dict.fromkeys(WAITS, 0.0)

    async def run(self, reports: MemoryObjectReceiveStream[Report]) -> None:
        """Report until the stream closes."""
        async with reports:
            async for step, version, known in reports:
                values = {**known, "version/learner": float(version)}
                with self._optional("engine"):
                    values |= self._rates(await self._engine.stats(), known)
                with self._optional("scorer"):
                    values |= self._scorer.stats()
                values |= self._totals()
                if self._state.plan.max_age is not None:
                    values["lag/bound"] = float(self._state.plan.max_age)
                self._journal.sink.log_metrics(step, values)
                self._state.mark_reported(step)

    def _rates(self, stats: EngineStats, known: Mapping[str, float]) -> dict[str, float]:
        now_s = self._journal.elapsed_s
        passed_s = max(now_s - self._before_s, 1e-9)  # two reports at one moment of a virtual clock
        before, self._before, self._before_s = self._before, stats, now_s
        learner_s = known.get("learner/busy_s", 0.0) + known.get("time/stage_s", 0.0)
        out = {
            "time/elapsed_s": now_s,
            "version/live": float(stats.version),
            "engine/tokens_per_s": (stats.decode_tokens - before.decode_tokens) / passed_s,
            "engine/idle_fraction": _idle((stats.busy_s - before.busy_s) / passed_s),
            "engine/busy_s": stats.busy_s,
            "engine/ready": float(stats.ready),
            "engine/prefill_tokens": float(stats.prefill_tokens),
            "engine/decode_tokens": float(stats.decode_tokens),
            "learner/idle_fraction": _idle(learner_s / passed_s),
            "learner/tokens_per_s": known.get("train/tokens", known.get("samples/tokens", 0.0)) / passed_s,
        }
        for name, wait in WAITS.items():
            total_s = self._journal.waits.total_s(*wait)
            out[name] = min(1.0, (total_s - self._waited_s[name]) / passed_s)
            self._waited_s[name] = total_s
        return out

    def _totals(self) -> dict[str, float]:
        occupancy = msgspec.structs.asdict(self._buffer.occupancy())
        return {
            **{f"groups/{name}": float(count) for name, count in self._state.ledger.counts().items()},
            **{f"buffer/{name}": float(count) for name, count in occupancy.items()},
            **self._sync.stats(),
        }

    @contextmanager
    def _optional(self, source: str) -> Generator[None]:
        """Leave out numbers that ``source`` fails to give, with one warning. A PipelineError, which ends a run, passes."""
        try:
            yield
        except PipelineError:
            raise
        except Exception as error:
            if source not in self._warned:
                self._warned.add(source)
                self._journal.sink.log_event("warning", f"no numbers of the {source}: {type(error).__name__}: {error}")


def _idle(busy: float) -> float:
    return min(1.0, max(0.0, 1.0 - busy))
