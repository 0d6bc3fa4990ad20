"""Numbers of a step that need the engine's answer, fetched beside the loop so that the learner never waits for them."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager

import msgspec
from anyio.streams.memory import MemoryObjectReceiveStream

from corrente.common.waiting import Condition
from corrente.controller.journal import Journal
from corrente.controller.ledger import Ledger
from corrente.controller.parts import Parts
from corrente.engine.base import EngineStats
from corrente.errors import PipelineError

Report = tuple[int, int, dict[str, float]]
"""Step, the learner's version after it, and what is known already."""

WAITS = {
    "wait/learner_groups_fraction": ("learn", "groups"),
    "wait/learner_publish_fraction": ("learn", "the flip of the version before"),
    "wait/feed_slot_fraction": ("feed", "a free slot"),
}


class Reporter:
    """Turns running totals into per-step rates. Idle fractions are of the time since the report before."""

    def __init__(self, parts: Parts, *, ledger: Ledger, journal: Journal, step: int = 0) -> None:
        """``step``: the last that was reported before."""
        self._step, self._changed, self._told = step, Condition(), set[str]()
        self._engine, self._scorer = parts.engine, parts.scorer
        self._buffer, self._sync = parts.buffer, parts.sync
        self._ledger = ledger
        self._journal = journal
        self._before = EngineStats(version=-1)
        self._before_s = journal.elapsed_s
        self._waited_s = dict.fromkeys(WAITS, 0.0)

    async def run(self, reports: MemoryObjectReceiveStream[Report], max_age: int | None) -> None:
        """Report until the stream closes."""
        async with reports:
            async for step, version, known in reports:
                values = {**known, "version/learner": float(version)}
                with self._spared("engine"):
                    values |= self._rates(await self._engine.stats(), known)
                with self._spared("scorer"):
                    values |= self._scorer.stats()
                values |= self._totals()
                if max_age is not None:
                    values["lag/bound"] = float(max_age)
                self._journal.sink.log_metrics(step, values)
                self._step = step
                self._changed.notify_all()

    async def reported(self, step: int) -> None:
        """Return when ``step`` is in the sinks: a checkpoint of it must not be there before its numbers are."""
        await self._changed.wait_for(lambda: self._step >= step)

    def _rates(self, stats: EngineStats, known: Mapping[str, float]) -> dict[str, float]:
        now_s = self._journal.elapsed_s
        passed_s = max(now_s - self._before_s, 1e-9)
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
        for name, (who, what) in WAITS.items():
            total_s = self._journal.waits.total_s(who, what)
            out[name] = min(1.0, (total_s - self._waited_s[name]) / passed_s)
            self._waited_s[name] = total_s
        return out

    def _totals(self) -> dict[str, float]:
        occupancy = msgspec.structs.asdict(self._buffer.occupancy())
        return {
            **{f"groups/{name}": float(count) for name, count in self._ledger.counts().items()},
            **{f"buffer/{name}": float(count) for name, count in occupancy.items()},
            **self._sync.stats(),
        }

    @contextmanager
    def _spared(self, who: str) -> Generator[None]:
        """Numbers that ``who`` does not give are missing in the report, and it is told once. What ends a run passes."""
        try:
            yield
        except PipelineError:
            raise
        except Exception as error:
            if who not in self._told:
                self._told.add(who)
                self._journal.sink.log_event("warning", f"no numbers of the {who}: {type(error).__name__}: {error}")


def _idle(busy: float) -> float:
    return min(1.0, max(0.0, 1.0 - busy))
