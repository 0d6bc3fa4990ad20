"""A virtual engine: continuous batching as arithmetic, one wake-up per event and none per token.

Every live sequence gains one token per decode step, so one number, the steps done so far, is the progress of all of them. It
grows while n sequences run, as fast as the speed model says (decode_clock.py), and stands still while the engine prefills or
flips. A sequence that
starts at step k and is n tokens long ends at step k + n whatever happens in between; only the time of that step moves. The
tokens a sequence has when weights change are the steps done since it started, so spans are exact and cost nothing.

It samples no tokens: a completion's ids all equal a checksum of its prompt, which lets a test see which prompt was played. How
long a completion becomes depends on the prompt and the seed alone: one that was interrupted ends where it would have ended.
"""

from __future__ import annotations

import heapq
import math
import zlib
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import anyio
import msgspec
import numpy as np

from corrente.common.waiting import Condition
from corrente.data.types import ApplyMode, Completion, FinishReason, Request, Scores, Span, Tokens
from corrente.engine.base import EngineStats
from corrente.errors import GenerationError, SyncError, WorkerDied
from corrente.sim.decode_clock import DecodeClock
from corrente.sim.distributions import Distribution, Fixed, generator
from corrente.sim.faults import Chaos
from corrente.sim.speed import Speed, SpeedModel
from corrente.sync.base import Update
from corrente.sync.offers import Offer

_EPS = 1e-6
"""Steps: what floating point may lose without a sequence ending one step late, or never."""

Lengths = Distribution | Callable[[Request], float]
"""Tokens a completion would have without a budget: drawn, or a function of the request."""

_LENGTH, _SPEED = Fixed(32), Speed()


@dataclass(slots=True, eq=False)
class _Live:
    """One request on its way; ``start`` is the step it began at, ``update`` the weights it samples from since, ``cut`` how many
    of its tokens already have a span."""

    key: int
    request: Request
    length: int
    reason: FinishReason
    start: float = math.inf
    update: Update | None = None
    cut: int = 0
    spans: list[Span] = field(default_factory=list[Span])
    done: anyio.Event = field(default_factory=anyio.Event)
    outcome: Completion | Exception | None = None


class VirtualEngine:
    """Implements Engine and Receiver. ``run`` is its clockwork: while it runs (see ``running``) calls return."""

    def __init__(
        self,
        *,
        lengths: Lengths = _LENGTH,
        speed: SpeedModel = _SPEED,
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
        self._held: Update | None = None
        self._slots: dict[int, int] = {}
        self._waiting: dict[int, _Live] = {}
        self._running: dict[int, _Live] = {}
        self._ends: list[tuple[float, int, _Live]] = []
        self._order = 0
        self._clock = DecodeClock(speed)
        self._settled_s = 0.0
        self._stalled_until_s = 0.0
        self._busy_s = 0.0
        self._decoded = 0
        self._prefilled = 0
        self._prompts: dict[str, int] = {}
        self._wake = anyio.Event()
        self._ended = Condition()
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

    async def score(self, tokens: Tokens, *, top: int = 0) -> Scores:
        self._check_usable()
        await anyio.sleep(len(tokens) * self._speed.prefill_token_s)
        return _scores(max(0, len(tokens) - 1), top)

    async def abort(self, ids: Sequence[str]) -> None:
        self._settle()
        for live in self._named(ids):
            self._end(live, self._so_far(live, self._position(live), "abort"))
        await anyio.lowlevel.checkpoint()

    async def partial_completions(self, ids: Sequence[str]) -> Mapping[str, Completion]:
        await self._chaos.strike("partials", "", GenerationError)
        self._settle()
        counts = [(live, self._position(live)) for live in self._named(ids)]
        found = {live.request.id: self._so_far(live, count, "abort") for live, count in counts if count}
        await anyio.lowlevel.checkpoint()
        return found

    async def stats(self) -> EngineStats:
        self._settle()
        return EngineStats(
            version=-1 if self._held is None else self._held.version,
            running=len(self._running),
            waiting=len(self._waiting),
            prefill_tokens=self._prefilled,
            decode_tokens=self._decoded + sum(self._position(live) for live in self._running.values()),
            busy_s=self._busy_s,
        )

    # ---- Receiver -----------------------------------------------------------------------------------------------------

    async def reserve(self, slot: int) -> None:
        self._check_alive(f"slot {slot}")
        if self._held is not None and self._held.slot == slot:
            raise SyncError(f"slot {slot} holds version {self._held.version}, which is live")
        await self._ended.wait_for(lambda: not self._samples_from(slot))
        self._slots.pop(slot, None)

    async def receive(self, offer: Offer) -> None:
        self._check_alive(f"version {offer.version}")
        await self._chaos.strike("receive", str(offer.version), SyncError)
        if offer.base is not None and offer.base != self.version:
            raise SyncError(f"version {offer.version} changes {offer.base}, but {self.version} is held")
        if self._samples_from(offer.slot) or (self._held is not None and self._held.slot == offer.slot):
            raise SyncError(f"version {offer.version} is to be put into slot {offer.slot}, which is being sampled from")
        self._slots[offer.slot] = offer.version
        await anyio.lowlevel.checkpoint()

    async def apply(self, update: Update, mode: ApplyMode) -> float:
        pause_s = await self.prepare(update)
        self.hold(update, mode)
        return pause_s

    async def held(self) -> int | None:
        return None if self._held is None else self._held.version

    def members(self) -> int:
        return 1

    # ---- weights and life ---------------------------------------------------------------------------------------------

    @property
    def load(self) -> int:
        """Requests that run or wait."""
        return len(self._running) + len(self._waiting)

    @property
    def version(self) -> int | None:
        """The version held; None after a start, and after ``restart``."""
        return None if self._held is None else self._held.version

    def has(self, update: Update) -> bool:
        """True if the version was received, whole, into its slot."""
        return self._slots.get(update.slot) == update.version

    async def prepare(self, update: Update) -> float:
        """Everything about ``apply`` that can fail or takes time; the old version is in use until ``hold``."""
        self._check_alive(f"version {update.version}")
        if not self.has(update):
            raise SyncError(
                f"version {update.version} was not received: slot {update.slot} has {self._slots.get(update.slot)}"
            )
        await self._chaos.strike("apply", str(update.version), SyncError)
        self._stall(self._speed.flip_s)
        await anyio.sleep(self._speed.flip_s)
        return self._speed.flip_s

    def hold(self, update: Update, mode: ApplyMode) -> None:
        """Make ``update`` the sampling weights, now: live sequences get a span up to here under the old one, and in mode
        "snapshot" keep it."""
        self._settle()
        if mode != "snapshot":
            for live in self._running.values():
                self._cut(live, self._position(live))
                live.update = update
        self._held = update
        self._prompts.clear()
        if mode == "recompute":
            context = sum(len(live.request.tokens) + live.cut for live in self._running.values())
            self._prefilled += context
            self._stall(context * self._speed.prefill_token_s)
        self._wake.set()
        self._ended.notify_all()

    def die(self, words: str = "the virtual engine died") -> None:
        """Fail every live request, and every later one, with WorkerDied."""
        self._dead = WorkerDied(words)
        self._fail_all(self._dead)

    def restart(self) -> None:
        """Come back as a new process would: live requests are lost and there are no weights until the next apply."""
        self._dead = None
        self._held = None
        self._slots.clear()
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
        if self._held is None:
            raise GenerationError("the virtual engine holds no weights yet")

    def _check_alive(self, what: str) -> None:
        if self._dead:
            raise SyncError(f"{what}: {self._dead}")

    def _samples_from(self, slot: int) -> bool:
        return any(live.update is not None and live.update.slot == slot for live in self._running.values())

    def _named(self, ids: Sequence[str]) -> list[_Live]:
        wanted = set(ids)
        return [x for x in (*self._running.values(), *self._waiting.values()) if x.request.id in wanted]

    def _plan(self, request: Request) -> _Live:
        """Decide the length from what was asked at first, and from nothing that happens beside it or between."""
        if len(request.tokens) >= self._max_context and request.written < request.sampling.max_tokens:
            raise GenerationError(f"a prompt of {len(request.tokens)} tokens leaves no room in {self._max_context}")
        first = _as_first_asked(request)
        budget = min(request.sampling.max_tokens, self._max_context - len(first.tokens))
        natural = max(0, round(self._draw(first)))
        self._order += 1
        left = max(0, min(natural, budget) - request.written)
        return _Live(self._order, request, left, "stop" if natural <= budget else "length")

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
            self._clock.advance(moved_s, len(self._running))
        self._settled_s = now_s

    def _stall(self, seconds: float) -> None:
        self._settle()
        self._stalled_until_s = max(self._stalled_until_s, anyio.current_time()) + seconds

    def _next_end_s(self) -> float:
        while self._ends and self._ends[0][2].outcome is not None:
            heapq.heappop(self._ends)
        if not self._ends:
            return math.inf
        left_s = self._clock.seconds_until(self._ends[0][0], len(self._running))
        return max(self._settled_s, self._stalled_until_s) + left_s

    def _finish_due(self) -> None:
        while self._ends and (self._ends[0][0] <= self._clock.steps + _EPS or self._ends[0][2].outcome is not None):
            live = heapq.heappop(self._ends)[2]
            if live.outcome is None:
                self._end(live, self._so_far(live, live.length, live.reason))

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._max_sequences:
            live = self._waiting.pop(next(iter(self._waiting)))
            self._prefill(live.request)
            live.start, live.update = self._clock.steps, self._held
            self._running[live.key] = live
            self._clock.add(len(live.request.tokens))
            heapq.heappush(self._ends, (live.start + live.length, live.key, live))

    def _prefill(self, request: Request) -> None:
        """The prompt once per group and version, whose members share its keys and values; what was written, each for itself."""
        missing = request.written
        if not request.group or request.group not in self._prompts:
            missing = len(request.tokens)
        if request.group:
            self._prompts[request.group] = len(request.tokens) - request.written
        self._prefilled += missing
        self._stall(missing * self._speed.prefill_token_s)

    def _position(self, live: _Live) -> int:
        """Tokens ``live`` has now."""
        return 0 if math.isinf(live.start) else min(live.length, math.floor(self._clock.steps - live.start + _EPS))

    def _cut(self, live: _Live, stop: int) -> None:
        if stop > live.cut and live.update is not None:
            live.spans.append(Span(live.update.version, live.cut, stop))
            live.cut = stop

    def _so_far(self, live: _Live, count: int, reason: FinishReason) -> Completion:
        rest = [Span(live.update.version, live.cut, count)] if live.update is not None and count > live.cut else []
        mark = zlib.crc32(_as_first_asked(live.request).tokens.tobytes()) & 0x7FFF
        return Completion(
            tokens=np.full(count, mark, np.int32),
            logprobs=np.full(count, -1.0, np.float32),
            spans=(*live.spans, *rest),
            finish_reason=reason,
        )

    def _end(self, live: _Live, outcome: Completion | Exception) -> None:
        live.outcome = outcome
        self._decoded += self._position(live)
        if self._running.pop(live.key, None) is not None:
            context = len(live.request.tokens) + self._clock.steps - live.start
            self._clock.remove(context, last=not self._running)
        self._waiting.pop(live.key, None)
        live.done.set()
        self._wake.set()
        self._ended.notify_all()

    def _forget(self, live: _Live) -> None:
        """The caller is gone: free the sequence, wherever it is."""
        if live.outcome is None:
            self._settle()
            self._end(live, GenerationError("cancelled"))

    def _fail_all(self, error: Exception) -> None:
        self._settle()
        for live in (*self._running.values(), *self._waiting.values()):
            self._end(live, error)


def _as_first_asked(request: Request) -> Request:
    """The request without what was written before an interruption."""
    if not request.written:
        return request
    return msgspec.structs.replace(request, tokens=request.tokens[: -request.written], written=0)


def _scores(count: int, top: int) -> Scores:
    return Scores(
        logprobs=np.full(count, -1.0, np.float32),
        top_ids=np.zeros((count, top), np.int32),
        top_logprobs=np.full((count, top), -1.0, np.float32),
    )
