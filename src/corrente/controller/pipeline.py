"""THE loop: feed -> generate -> score -> buffer -> learn -> publish.

stage      waits for                                     is woken by                            ends with
---------  --------------------------------------------  -------------------------------------  ---------------------------
feed       a free slot (admission: the only throttle)    publish (weights live), or a drop      a ticket and its prompt
generate   the request gate, then the engine             the inflight policy; the engine        G episodes, or given up
score      the scorer, under its deadline                the scorer                             a group with rewards
buffer     nothing                                       -                                      put, or drop with a reason
learn      P groups that may be consumed                 buffer                                 one optimizer step
export     the flip of the version before                publish                                a copy of the weights
publish    an exported version; its delivery; who        learn; the engines                     version + 1, freed slots
           samples from older ones; the inflight policy
evaluate   a version that is due                         publish                                held-out reward
report     a finished step                               learn                                  metrics in the sinks
watch      the clock                                     what moves (watchdog.py)               StallError when nothing moved

Every prompt that is admitted ends in exactly one of trained / filtered / failed / stale / cancelled (``Ledger``). The version
advances only when every engine has applied it, and only then do the slots of the groups it was trained on come free; with
consumption inside the window this bounds the age of every trained token, which is asserted in ``_learn``.

The learner waits for the copy of its weights and takes its next step while they are delivered. One version at most is exported
and not live: the copy needs the memory of the version before the live one.

No wall clock and no threads: time is ``anyio.current_time()``, so the same code runs under asyncio in production and under trio
with a virtual clock in tests and in the planner.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AsyncExitStack, contextmanager
from functools import partial
from pathlib import Path

import anyio
import msgspec
from anyio.abc import TaskGroup
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from corrente.common.waiting import Condition
from corrente.controller.alarms import Alarms
from corrente.controller.checkpointer import Checkpointer
from corrente.controller.evaluator import Evaluator
from corrente.controller.failure_budget import failure_at_end_of_data
from corrente.controller.journal import FLIP_WAIT, GROUPS_WAIT, SLOT_WAIT
from corrente.controller.ledger import Admission
from corrente.controller.partial_rollout import partial_rollouts
from corrente.controller.parts import Parts, RunResult
from corrente.controller.publisher import Publisher
from corrente.controller.reporter import Report, Reporter
from corrente.controller.request_gate import RequestGate
from corrente.controller.rollout import Player, first_error, score_group, survivors
from corrente.controller.run_state import RunState
from corrente.controller.snapshot import Snapshot, Unfinished
from corrente.controller.step_metrics import ScoreStats, lag_metrics, sample_records, trained_metrics
from corrente.controller.watchdog import watch
from corrente.data.age import assert_age_bound
from corrente.data.types import Batch, Group, GroupOutcome, Metrics, Prompt
from corrente.errors import AlarmError, EndOfStream, FailureBudgetError, NothingToLearnError, root_cause, while_running

Exported = tuple[int, tuple[int, ...], int]
"""A version on its way, the groups whose slots it frees, and the step whose weights it brings."""


async def run(parts: Parts, *, snapshot: Snapshot | None = None, stop: anyio.Event | None = None) -> RunResult:
    """Run the pipeline to its end. ``snapshot``: continue from a checkpoint. ``stop``: once set, end at the next version,
    with a checkpoint. Errors come out as one exception, the first that happened."""
    try:
        return await Pipeline(parts, snapshot=snapshot, stop=stop).run()
    except BaseExceptionGroup as group:
        raise root_cause(group) from group
    finally:
        parts.sink.close()


class Pipeline:
    """The stages of one run, as methods, in the order in which data passes them; ``state`` is what they change."""

    def __init__(self, parts: Parts, *, snapshot: Snapshot | None = None, stop: anyio.Event | None = None) -> None:
        self.parts = parts
        self.plan = parts.plan
        self.state = state = RunState(parts, snapshot)
        self.ledger, self.journal = state.ledger, state.journal
        self.gate = RequestGate(parts.engine.abort)
        self._alarms = Alarms(self.plan.alarm, parts.sink)
        self._player = Player(parts, parts.env, gate=self.gate, waits=self.journal.waits, budget=state.failures)
        self._publisher = Publisher(parts, request_gate=self.gate, journal=self.journal)
        self._evaluator = Evaluator(parts, state, gate=self.gate)
        self._reporter = Reporter(parts, state)
        self._checkpointer = Checkpointer(parts, state)
        self._stop = stop or anyio.Event()
        self._feeding, self._collecting = anyio.CancelScope(), anyio.CancelScope()
        self._failure: Exception | None = None
        self._last_step_has_groups = False
        self._landed = Condition()
        self._trained_since_export: list[int] = []
        self._scored = ScoreStats()

    async def run(self) -> RunResult:
        """All stages side by side, until the last step is taken, the data ends or ``stop`` is set."""
        ended, checkpoint = "", None
        async with anyio.create_task_group() as watching:
            watching.start_soon(
                partial(watch, self.journal, self.parts, players=(self._player, self._evaluator.player))
            )
            watching.start_soon(self._watch_stop)
            self.state.version = (await self._publisher.publish(self.state.learner_version)).version
            ended = await self._flow()
            if ended == "data" and (failure := failure_at_end_of_data(self.state.failures, self.ledger)):
                ended, self._failure = "failed", failure
            if ended != "failed" and not self._stop.is_set():
                await self._evaluator.run(step=self.state.live_step, version=self.state.version)
            checkpoint = await self._checkpoint() if self.state.at_version or ended != "failed" else None
            watching.cancel_scope.cancel()
        if self._failure is not None:
            raise self._failure
        self.ledger.settle_rest("cancelled", "the run ended")
        return RunResult(
            ended=ended,
            steps=self.state.step,
            version=self.state.version,
            counts=self.ledger.counts(),
            elapsed_s=self.journal.elapsed_s,
            checkpoint=checkpoint,
        )

    async def _flow(self) -> str:
        """feed .. publish. Ends when ``_learn`` does: closing its streams ends publish and report, the feed is cancelled."""
        exports, exports_in = anyio.create_memory_object_stream[Exported](1)
        reports, reports_in = anyio.create_memory_object_stream[Report](64)
        ended = ""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._feed)
            tasks.start_soon(self._publish, exports_in, tasks)
            tasks.start_soon(self._reporter.run, reports_in)
            self._evaluate_when_due(tasks)
            async with exports, reports:
                ended = await self._learn(exports, reports)
            await self._end_generation()
            self._evaluator.use_whole_engine()
        return ended

    async def _end_generation(self) -> None:
        """Record the tokens of live requests for the checkpoint, then cancel them; those of an evaluation only on a stop or a
        failure."""
        await self._checkpointer.record_partials()
        self._feeding.cancel()
        if self._failure or self._stop.is_set():
            self._evaluator.cancel()

    # ---- feed, generate, score, buffer ----------------------------------------------------------------------------------------

    async def _feed(self) -> None:
        """Admit prompts as slots come free: first those a checkpoint left unfinished, in their order, then new ones."""
        again = list(self.parts.prompts.find_prompts([unfinished.prompt_id for unfinished in self.state.carried]))
        with self._feeding:
            async with anyio.create_task_group() as rollouts:
                while True:
                    with self.journal.waits.register_wait(*SLOT_WAIT):
                        try:
                            ticket = (await self.parts.buffer.reserve()).id
                        except EndOfStream:
                            return
                    try:
                        prompt = again.pop(0) if again else self.parts.prompts.next_prompt()
                    except Exception as error:
                        return self._end_early(while_running(error, begun=self.state.step > 0))
                    if prompt is None:
                        self.parts.buffer.drop(ticket)
                        self.parts.buffer.close()
                        return
                    self._admit(ticket, prompt, rollouts)

    def _admit(self, ticket: int, prompt: Prompt, rollouts: TaskGroup) -> None:
        state = self.state
        state.next_ticket = ticket + 1
        unfinished = state.carried.pop(0) if state.carried else Unfinished(prompt_id=prompt.id)
        partials = partial_rollouts(self.plan.group_size, unfinished.answers)
        admission = Admission(prompt=prompt, version=state.version, partials=partials)
        self.ledger.admit(ticket, admission)
        self.journal.moved()
        if unfinished.group is None:
            rollouts.start_soon(self._try_rollout, ticket, admission)
        else:
            self._put(msgspec.structs.replace(unfinished.group, id=ticket))

    async def _try_rollout(self, ticket: int, admission: Admission) -> None:
        """Roll out one group. Where generation cannot go on but the learner is well, the run ends with a checkpoint, then the
        error."""
        try:
            async with AsyncExitStack() as releases:
                await self._rollout(ticket, admission, releases)
        except Exception as error:
            failure = root_cause(error)
            if not isinstance(failure, NothingToLearnError | FailureBudgetError):
                raise
            self._end_early(failure)

    def _end_early(self, failure: Exception) -> None:
        """Generate no more: the last step has its groups and goes on, or else the run ends, with ``failure``, after this step."""
        self._feeding.cancel()
        if self._last_step_has_groups:
            return self.parts.sink.log_event(
                "warning", f"generation ended while the last step was under way: {failure}"
            )
        self._fail(failure)

    def _fail(self, failure: Exception) -> None:
        """End the run, with the first failure, after the step that is under way."""
        self._feeding.cancel()
        self._failure = self._failure or failure
        self._collecting.cancel()

    async def _rollout(self, ticket: int, admission: Admission, releases: AsyncExitStack) -> None:
        """Generate and score one group. It ends in the buffer, or dropped with a reason, and its slot comes back. ``releases``:
        the environments it was played in, which live until it is scored."""
        async with self.gate.group(ticket, version=admission.version) as passage:
            with self._timed("generate", f"group {ticket}", prompt=admission.prompt.id):
                played = await self._player.group(ticket, admission, seed=self.plan.seed, releases=releases)
        if passage.given_up:
            return self._drop(ticket, "cancelled", "still generating when the inflight policy gave it up")
        group, error = survivors(played), first_error(played)
        if group.episodes:
            with self._timed("score", f"group {ticket}"), self.journal.waits.register_wait("score", "the scorer"):
                after = await score_group(self.parts.scorer, group, self.state.failures)
            group, error = survivors(after), error or first_error(after)
            self._scored.add(group)
        reason = self.parts.algorithm.trainable(group)
        if error and (not group.episodes or (reason and len(group.episodes) < 2)):
            reason = error.splitlines()[0][:200]
            self._drop(ticket, "failed", reason)
        elif reason:
            self._drop(ticket, "filtered", reason)
        else:
            self._put(group)
        self.state.untrainable.filtered.count(1, reason)

    def _put(self, group: Group) -> None:
        self.ledger.finish(group)
        self.parts.buffer.put(group)
        self.journal.moved()

    def _drop(self, ticket: int, outcome: GroupOutcome, reason: str) -> None:
        self.ledger.settle(ticket, outcome, reason)
        self.parts.buffer.drop(ticket)
        self.journal.moved()

    # ---- learn ----------------------------------------------------------------------------------------------------------------

    async def _learn(self, exports: MemoryObjectSendStream[Exported], reports: MemoryObjectSendStream[Report]) -> str:
        """Take P groups, take a step, export the new weights; returns why it ended."""
        state, checkpoint_due = self.state, False
        while state.step < self.plan.steps:
            began_s = self.journal.elapsed_s
            groups, limits = await self._collect()
            if not groups:
                await self._export(exports)
                return "failed" if self._failure else "stopped" if self._stop.is_set() else "data"
            taken_s = self.journal.elapsed_s
            batch = self.parts.algorithm.batch(
                groups, step=state.step, version=state.learner_version, oldest_trainable=limits
            )
            assert_age_bound(batch.lags(), bound=self.plan.max_age)
            values = await self._step(batch)
            state.step += 1
            state.steps_since_export += 1
            try:
                self._account(groups, batch, values)
            except (NothingToLearnError, AlarmError) as failure:
                self._fail(failure)
            stepped_s = self.journal.elapsed_s
            if state.at_version or len(groups) < self.plan.prompts_per_step:
                await self._export(exports)
            values |= trained_metrics(groups) | lag_metrics(batch, groups, limits) | self._scored.metrics()
            self._scored = ScoreStats()
            values["time/wait_groups_s"] = taken_s - began_s
            values["time/stage_s"] = self.journal.elapsed_s - stepped_s
            values["time/step_s"] = self.journal.elapsed_s - began_s
            await reports.send((state.step, state.learner_version, values))
            checkpoint_due |= bool(self.plan.checkpoint_every) and state.step % self.plan.checkpoint_every == 0
            if checkpoint_due and state.at_version:
                checkpoint_due = False
                await self._checkpoint()
        await self._export(exports)
        return "steps"

    async def _step(self, batch: Batch) -> dict[str, float]:
        with (
            self._timed("learn", f"step {self.state.step + 1}", version=batch.version, rows=len(batch.rows)),
            self.journal.waits.register_wait("learn", "the learner"),
        ):
            return dict(await self.parts.learner.step(batch))

    async def _collect(self) -> tuple[list[Group], list[int | None]]:
        """P groups that are not stale, in admission order; fewer only when the data ended; none when asked to stop, which
        happens between versions. Groups in hand at that moment stay outstanding, for the checkpoint."""
        groups: list[Group] = []
        limits: list[int | None] = []
        if self._failure or (self._stop.is_set() and self.state.at_version):
            return [], []
        with anyio.CancelScope() as self._collecting, self.journal.waits.register_wait(*GROUPS_WAIT):
            while len(groups) < self.plan.prompts_per_step:
                taken = await self.parts.buffer.take(self.plan.prompts_per_step - len(groups))
                for group in taken:
                    verdict = self.parts.staleness.judge(group, self.state.learner_version)
                    if verdict.stale:
                        self._drop(group.id, "stale", verdict.stale)
                    else:
                        groups.append(group)
                        limits.append(verdict.oldest_trainable)
                if not taken:
                    break
        self.journal.moved()
        if self._collecting.cancelled_caught:
            return [], []
        self._last_step_has_groups = self.state.step + 1 >= self.plan.steps
        return groups, limits

    async def _watch_stop(self) -> None:
        """Between versions, a stop also ends the wait for groups and for a flip that waits for requests; within one, the version
        is finished first. Once nothing is generated any more, it ends the last evaluation."""
        await self._stop.wait()
        self._landed.notify_all()
        if self._feeding.cancel_called:
            self._evaluator.cancel()
        if self.state.at_version:
            self._collecting.cancel()

    def _account(self, groups: list[Group], batch: Batch, values: Metrics) -> None:
        """Settle the groups of a step, report samples, judge its numbers. Raises NothingToLearnError and AlarmError."""
        for group in groups:
            self.ledger.settle(group.id, "trained")
            self._trained_since_export.append(group.id)
        for sample in sample_records(groups, count=self.plan.samples_per_step, version=batch.version):
            self.parts.sink.log_sample(self.state.step, sample)
        self.journal.moved()
        self.state.untrainable.empty.count(len(groups), "" if batch.rows else "no row of the step carries a gradient")
        self._alarms.check_step(self.state.step, values, may_stop=self.state.at_version)

    # ---- publish --------------------------------------------------------------------------------------------------------------

    async def _export(self, exports: MemoryObjectSendStream[Exported]) -> None:
        """Copy the learner's weights; the learner may go on the moment this returns, and they are delivered meanwhile."""
        if not self._trained_since_export:
            return
        with self.journal.waits.register_wait(*FLIP_WAIT):
            await self._landed.wait_for(lambda: self.state.caught_up or self._stop.is_set())
            if not self.state.caught_up:
                await self._end_generation()
            await self._landed.wait_for(lambda: self.state.caught_up)
        with self.journal.waits.register_wait("learn", "the export"):
            await self._publisher.export(self.state.learner_version + 1)
        self.state.learner_version += 1
        freed, self._trained_since_export = tuple(self._trained_since_export), []
        self.state.steps_since_export = 0
        exports.send_nowait((self.state.learner_version, freed, self.state.step))

    async def _publish(self, exports: MemoryObjectReceiveStream[Exported], tasks: TaskGroup) -> None:
        """Deliver and land each exported version in turn; when it is live the version advances, and slots come free."""
        async with exports:
            async for version, freed, step in exports:
                await self._publisher.land(await self._publisher.deliver(version))
                self.state.version, self.state.live_step = version, step
                self.parts.buffer.release(freed)
                self._landed.notify_all()
                self._evaluate_when_due(tasks)

    # ---- evaluations, checkpoints, spans ---------------------------------------------------------------------------------------

    def _evaluate_when_due(self, tasks: TaskGroup) -> None:
        """The last version is left to the evaluation after the last step."""
        over = self._failure or self._stop.is_set() or self.state.step >= self.plan.steps
        if self._evaluator.due(self.state.version) and not over:
            tasks.start_soon(lambda: self._evaluator.run(step=self.state.live_step, version=self.state.version))

    async def _checkpoint(self) -> Path | None:
        """Write the state between two steps, and the learner's weights with it."""
        await self._checkpointer.record_partials()
        return await self._checkpointer.write()

    @contextmanager
    def _timed(self, track: str, name: str, **attrs: object) -> Generator[None]:
        start_s = self.journal.elapsed_s
        yield
        self.journal.span(track, name, start_s, **attrs)
        self.journal.moved()
