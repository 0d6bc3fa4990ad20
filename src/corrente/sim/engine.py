"""A virtual engine: continuous batching as arithmetic, one wake-up per event and none per token.

Every live sequence gains one token per decode step, so one number, the steps done so far, is the progress of all of them. It
grows at 1 / decode_s(n) per second while n sequences run and stands still while the engine prefills or flips. A sequence that
starts at step k and is n tokens long ends at step k + n whatever happens in between; only the time of that step moves. The
tokens a sequence has when weights change are the steps done since it started, so spans are exact and cost nothing.

It samples no tokens: a completion's ids all equal a checksum of its prompt, which lets a test see which prompt was played.
"""

from __future__ import annotations

import heapq
import math
import zlib
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import anyio
import msgspec
import numpy as np

from corrente.engine.base import ApplyMode, EngineStats
from corrente.errors import GenerationError, SyncError, WorkerDied
from corrente.sim.distributions import Distribution, Fixed, generator
from corrente.sim.faults import Chaos
from corrente.sync.base import Update
from corrente.types import Completion, FinishReason, Floats, Request, Span, Tokens

_EPS = 1e-6
"""Steps: what floating point may lose without a sequence ending one step late, or never."""


class Speed(msgspec.Struct, frozen=True, kw_only=True):
    """What generation costs: a decode step of n sequences takes ``step_s + n * per_sequence_s``; a prompt stalls all of them
    for ``prefill_token_s`` per token, once for a group; a flip stalls them for ``flip_s``."""

    step_s: float = 0.02
    per_sequence_s: float = 0.0005
    prefill_token_s: float = 0.0
    flip_s: float = 0.0

    def decode_s(self, sequences: int) -> float:
        return self.step_s + sequences * self.per_sequence_s


Lengths = Distribution | Callable[[Request], float]
"""Tokens a completion would have without a budget: drawn, or a function of the request."""

_LENGTH = Fixed(32)
_SPEED = Speed()


@dataclass(slots=True, eq=False)
class _Live:
    """One request on its way; ``start`` is the step it began at, ``cut`` how many of its tokens already have a span."""

    key: int
    request: Request
    length: int
    reason: FinishReason
    start: float = math.inf
    cut: int = 0
    spans: list[Span] = field(default_factory=list[Span])
    done: anyio.Event = field(default_factory=anyio.Event)
    outcome: Completion | Exception | None = None


class VirtualEngine:
    """Implements Engine. ``run`` is its clockwork: it must be running for ``generate`` to return (see ``running``)."""

    def __init__(
        self,
        *,
        lengths: Lengths = _LENGTH,
        speed: Speed = _SPEED,
        max_sequences: int = 64,
        max_context: int = 1 << 20,
        seed: int = 0,
        chaos: Chaos | None = None,
    ) -> None:
        self._lengths = lengths
        self._speed = speed
        self._max_sequences = max_sequences
        self._max_context = max_context
        self._seed = seed
        self._chaos = chaos or Chaos(seed=seed)
        self._version: int | None = None
        self._waiting: dict[int, _Live] = {}
        self._running: dict[int, _Live] = {}
        self._ends: list[tuple[float, int, _Live]] = []
        self._order = 0
        self._steps = 0.0
        self._settled_s = 0.0
        self._stalled_until_s = 0.0
        self._busy_s = 0.0
        self._decoded = 0
        self._prefilled = 0
        self._prompts: dict[str, int] = {}
        self._wake = anyio.Event()
        self._dead: WorkerDied | None = None

    # ---- Engine -------------------------------------------------------------------------------------------------------

    async def generate(self, request: Request) -> Completion:
        try:
            await self._chaos.strike("generate", request.id, GenerationError)
        except WorkerDied as death:
            self.die(str(death))
        self._check_usable()
        live = self._plan(request)
        self._waiting[live.key] = live
        self._wake.set()
        try:
            await live.done.wait()
        finally:
            self._forget(live)
        if isinstance(live.outcome, Exception):
            raise live.outcome
        assert live.outcome is not None
        return live.outcome

    async def score(self, tokens: Tokens) -> Floats:
        self._check_usable()
        await anyio.sleep(len(tokens) * self._speed.prefill_token_s)
        return np.full(max(0, len(tokens) - 1), -1.0, np.float32)

    async def abort(self, ids: Sequence[str]) -> None:
        self._settle()
        wanted = set(ids)
        for live in [x for x in (*self._running.values(), *self._waiting.values()) if x.request.id in wanted]:
            self._end(live, self._complete(live, self._position(live), "abort"))
        await anyio.lowlevel.checkpoint()

    async def apply(self, update: Update, mode: ApplyMode) -> float:
        pause_s = await self.prepare(update)
        self.hold(update.version, mode)
        return pause_s

    async def stats(self) -> EngineStats:
        self._settle()
        return EngineStats(
            version=-1 if self._version is None else self._version,
            running=len(self._running),
            waiting=len(self._waiting),
            prefill_tokens=self._prefilled,
            decode_tokens=self._decoded + sum(self._position(live) for live in self._running.values()),
            busy_s=self._busy_s,
        )

    # ---- weights and life ---------------------------------------------------------------------------------------------

    @property
    def version(self) -> int | None:
        """The version held; None after a start, and after ``restart``."""
        return self._version

    async def prepare(self, update: Update) -> float:
        """Everything about ``apply`` that can fail or takes time; the old version is in use until ``hold``."""
        if self._dead:
            raise SyncError(f"version {update.version}: {self._dead}")
        await self._chaos.strike("apply", str(update.version), SyncError)
        self._stall(self._speed.flip_s)
        await anyio.sleep(self._speed.flip_s)
        return self._speed.flip_s

    def hold(self, version: int, mode: ApplyMode) -> None:
        """Make ``version`` the sampling weights, now: live sequences get a span up to here under the old one."""
        self._settle()
        for live in self._running.values():
            self._cut(live, self._position(live))
        self._version = version
        self._prompts.clear()
        if mode == "recompute":
            context = sum(len(live.request.tokens) + live.cut for live in self._running.values())
            self._prefilled += context
            self._stall(context * self._speed.prefill_token_s)
        self._wake.set()

    def die(self, words: str = "the virtual engine died") -> None:
        """Fail every live request, and every later one, with WorkerDied."""
        self._dead = WorkerDied(words)
        self._fail_all(self._dead)

    def restart(self) -> None:
        """Come back as a new process would: live requests are lost and there are no weights until the next apply."""
        self._dead = None
        self._version = None
        self._prompts.clear()
        self._fail_all(GenerationError("the virtual engine was restarted"))

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[VirtualEngine]:
        """Run the clockwork in the background of the block; an error of the block comes out as it is."""
        failure: Exception | None = None
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.run)
            try:
                yield self
            except Exception as error:
                failure = error
            tasks.cancel_scope.cancel()
        if failure is not None:
            raise failure

    async def run(self) -> None:
        """The clockwork: finish what is due, admit what fits, sleep until the next end or the next change."""
        self._settled_s = anyio.current_time()
        while True:
            self._settle()
            self._finish_due()
            self._admit()
            self._wake = anyio.Event()
            with anyio.CancelScope(deadline=self._next_end_s()):
                await self._wake.wait()

    # ---- clockwork ----------------------------------------------------------------------------------------------------

    def _check_usable(self) -> None:
        if self._dead:
            raise self._dead
        if self._version is None:
            raise GenerationError("the virtual engine holds no weights yet")

    def _plan(self, request: Request) -> _Live:
        """Decide the length from what the request asks, and from nothing that happens beside it."""
        room = self._max_context - len(request.tokens)
        if room <= 0:
            raise GenerationError(f"a prompt of {len(request.tokens)} tokens leaves no room in {self._max_context}")
        budget = min(request.sampling.max_tokens, room)
        natural = max(0, round(self._draw(request)))
        self._order += 1
        return _Live(self._order, request, min(natural, budget), "stop" if natural <= budget else "length")

    def _draw(self, request: Request) -> float:
        if callable(self._lengths):
            return self._lengths(request)
        return self._lengths.draw(generator(self._seed, request.seed, zlib.crc32(request.tokens.tobytes())))

    def _settle(self) -> None:
        """Bring the step count up to the present, at the rate of the sequences that ran since the last time."""
        now_s = anyio.current_time()
        if now_s <= self._settled_s:
            return
        moved_s = max(0.0, now_s - max(self._settled_s, self._stalled_until_s))
        if self._running:
            self._busy_s += now_s - self._settled_s
            self._steps += moved_s / self._speed.decode_s(len(self._running))
        self._settled_s = now_s

    def _stall(self, seconds: float) -> None:
        self._settle()
        self._stalled_until_s = max(self._stalled_until_s, anyio.current_time()) + seconds

    def _next_end_s(self) -> float:
        while self._ends and self._ends[0][2].outcome is not None:
            heapq.heappop(self._ends)
        if not self._ends:
            return math.inf
        left = max(0.0, self._ends[0][0] - self._steps) * self._speed.decode_s(len(self._running))
        return max(self._settled_s, self._stalled_until_s) + left

    def _finish_due(self) -> None:
        while self._ends and (self._ends[0][0] <= self._steps + _EPS or self._ends[0][2].outcome is not None):
            live = heapq.heappop(self._ends)[2]
            if live.outcome is None:
                self._end(live, self._complete(live, live.length, live.reason))

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._max_sequences:
            live = self._waiting.pop(next(iter(self._waiting)))
            self._prefill(live.request)
            live.start = self._steps
            self._running[live.key] = live
            heapq.heappush(self._ends, (live.start + live.length, live.key, live))

    def _prefill(self, request: Request) -> None:
        """Once per group and version: its members share the prompt's keys and values."""
        if request.group and request.group in self._prompts:
            return
        if request.group:
            self._prompts[request.group] = len(request.tokens)
        self._prefilled += len(request.tokens)
        self._stall(len(request.tokens) * self._speed.prefill_token_s)

    def _position(self, live: _Live) -> int:
        """Tokens ``live`` has now."""
        return 0 if math.isinf(live.start) else min(live.length, math.floor(self._steps - live.start + _EPS))

    def _cut(self, live: _Live, stop: int) -> None:
        if stop > live.cut and self._version is not None:
            live.spans.append(Span(self._version, live.cut, stop))
            live.cut = stop

    def _complete(self, live: _Live, count: int, reason: FinishReason) -> Completion:
        self._cut(live, count)
        self._decoded += count
        mark = zlib.crc32(live.request.tokens.tobytes()) & 0x7FFF
        return Completion(
            tokens=np.full(count, mark, np.int32),
            logprobs=np.full(count, -1.0, np.float32),
            spans=tuple(live.spans),
            finish_reason=reason,
        )

    def _end(self, live: _Live, outcome: Completion | Exception) -> None:
        live.outcome = outcome
        self._running.pop(live.key, None)
        self._waiting.pop(live.key, None)
        live.done.set()
        self._wake.set()

    def _forget(self, live: _Live) -> None:
        """The caller is gone: free the sequence, wherever it is."""
        if live.outcome is None:
            self._settle()
            self._end(live, GenerationError("cancelled"))

    def _fail_all(self, error: Exception) -> None:
        self._settle()
        for live in (*self._running.values(), *self._waiting.values()):
            self._end(live, error)


class VirtualPool:
    """Several virtual engines behind one Engine: a request goes to the least loaded one that holds the current version.

    An engine that was restarted, or missed an update, gets no request until it has been brought up to date.
    """

    def __init__(self, engines: Iterable[VirtualEngine]) -> None:
        self.engines = tuple(engines)
        self._version: int | None = None
        self._changed = anyio.Event()

    def ready(self) -> list[VirtualEngine]:
        return [e for e in self.engines if e.version is not None and e.version == self._version]

    def advance(self, version: int) -> None:
        """From now on only engines that hold ``version`` get requests."""
        self._version = version
        self._changed.set()
        self._changed = anyio.Event()

    async def generate(self, request: Request) -> Completion:
        while not (ready := self.ready()):
            await self._changed.wait()
        loads = [(s.running + s.waiting, i) for i, s in enumerate([await engine.stats() for engine in ready])]
        return await ready[min(loads)[1]].generate(request)

    async def score(self, tokens: Tokens) -> Floats:
        while not (ready := self.ready()):
            await self._changed.wait()
        return await ready[0].score(tokens)

    async def abort(self, ids: Sequence[str]) -> None:
        for engine in self.engines:
            await engine.abort(ids)

    async def apply(self, update: Update, mode: ApplyMode) -> float:
        pauses = [await engine.prepare(update) for engine in self.engines]
        for engine in self.engines:
            engine.hold(update.version, mode)
        self.advance(update.version)
        return max(pauses, default=0.0)

    async def stats(self) -> EngineStats:
        every = [await engine.stats() for engine in self.engines]
        return EngineStats(
            version=-1 if self._version is None else self._version,
            running=sum(s.running for s in every),
            waiting=sum(s.waiting for s in every),
            prefill_tokens=sum(s.prefill_tokens for s in every),
            decode_tokens=sum(s.decode_tokens for s in every),
            busy_s=sum(s.busy_s for s in every),
        )
