"""One run from a config to its outcome: started, resumed, stopped by signals."""

from __future__ import annotations

import signal
from collections.abc import Sequence

import anyio

from corrente.common import rng
from corrente.common.child_process import STOPS
from corrente.common.imports import load_object
from corrente.config import RunConfig
from corrente.controller import checkpoint_folder, pipeline
from corrente.controller.parts import RunResult
from corrente.entrypoints.assemble import open_parts
from corrente.entrypoints.inputs import NO_INPUTS, RunInputs
from corrente.entrypoints.run_folder import run_folder_path
from corrente.errors import CheckpointError, Interrupted, root_cause
from corrente.observe.base import Sink
from corrente.observe.fanout import Fanout


async def run_training(
    config: RunConfig,
    *,
    sinks: Sequence[Sink] = (),
    resume: bool = False,
    inputs: RunInputs = NO_INPUTS,
    signals: bool = True,
    stop: anyio.Event | None = None,
) -> RunResult:
    """Run ``config`` to its end in its run folder. ``resume``: go on from the newest complete checkpoint there.

    ``inputs`` replace what the config names. Once ``stop`` is set the run ends at the next version, with a checkpoint.
    With ``signals``, the first SIGINT, SIGTERM or SIGHUP stops the run at the next version, with a checkpoint; the second, or one
    before everything has started, raises Interrupted. Raises PipelineError, or ConfigError for what only the model's files
    could tell.
    """
    checkpoints = run_folder_path(config) / "checkpoints"
    newest = checkpoint_folder.latest(checkpoints) if resume else None
    if resume and newest is None:
        raise CheckpointError(f"nothing to resume: {checkpoints} holds no complete checkpoint; run it without --resume")
    snapshot = checkpoint_folder.read(newest) if newest else None
    stop, started = stop or anyio.Event(), anyio.Event()
    outcome: RunResult | None = None
    try:
        async with anyio.create_task_group() as tasks:
            if signals:
                tasks.start_soon(_heed_signals, started, stop, Fanout(sinks))
            for caution in load_object("corrente.adapters.checks:cautions")(config):
                Fanout(sinks).event("warning", caution)
            async with open_parts(config, sinks=sinks, folder=checkpoints, snapshot=snapshot, inputs=inputs) as parts:
                if newest:
                    await parts.learner.load(newest / checkpoint_folder.LEARNER)
                if snapshot:
                    rng.restore(snapshot.randomness)
                started.set()
                outcome = await pipeline.run(parts, snapshot=snapshot, stop=stop)
            tasks.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        raise root_cause(group) from group
    assert outcome is not None
    return outcome


async def _heed_signals(started: anyio.Event, stop: anyio.Event, sink: Sink) -> None:
    outlives_the_terminal = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN  # as nohup has it
    with anyio.open_signal_receiver(*(STOPS - {signal.SIGHUP} if outlives_the_terminal else STOPS)) as signals:
        async for _ in signals:
            if not started.is_set():
                raise Interrupted("asked to stop before everything had started")
            if stop.is_set():
                raise Interrupted("asked twice to stop")
            sink.event("info", "stopping at the next version, with a checkpoint; once more to stop at once, without")
            stop.set()
