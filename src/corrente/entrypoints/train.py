"""Train: one run from a config to its result.

train(config)           the whole of it, from code that is not async: run folder, sinks, run. `corrente run` calls it
run_training(config)    the run alone, in a folder that exists, with the caller's sinks
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import TextIO

import anyio
from rich.console import Console

from corrente.common import rng
from corrente.config import Procs, RunConfig, Window
from corrente.config.paths import absolute_paths
from corrente.controller import checkpoint_folder, pipeline
from corrente.controller.parts import RunResult
from corrente.data.checkpoint_names import CHECKPOINTS, LEARNER
from corrente.entrypoints import run_folder
from corrente.entrypoints.assemble import open_parts
from corrente.entrypoints.blocking import run_blocking
from corrente.entrypoints.checks import cautions, check_config
from corrente.entrypoints.inputs import NO_INPUTS, RunInputs, recorded_config
from corrente.entrypoints.run_folder import LOGS, run_folder_path
from corrente.entrypoints.stop_signals import receive_stop_signals, stop_on_signals
from corrente.entrypoints.train_result import TrainResult, train_result
from corrente.errors import CheckpointError, ConfigError, root_cause
from corrente.models import cache as model_cache
from corrente.observe.base import Sink
from corrente.observe.console import ConsoleSink
from corrente.observe.fanout import Fanout
from corrente.observe.jsonl import JsonlSink, read_metrics
from corrente.observe.summary import SummarySink
from corrente.observe.trackers import open_trackers


def train(
    config: RunConfig,
    *,
    resume: bool = False,
    inputs: RunInputs = NO_INPUTS,
    sinks: Sequence[Sink] = (),
    console: TextIO | None = None,
) -> TrainResult:
    """Train a model as ``config`` says, and return what came of it. Writes run.dir/run.name, as `corrente run` does.

    ``resume``: go on from the newest complete checkpoint of the run of this name. ``inputs`` replace what the config names.
    ``sinks`` are told what the run's files are told. ``console``: a live table is shown there; None: nothing is printed.

    It may be called from a script, from a thread, and where an event loop runs already, as in a notebook. Ctrl-C, in the main
    thread, stops the run at the next version with a checkpoint (``ended`` is "stopped" then); a second one raises Interrupted, or
    in a notebook KeyboardInterrupt. Raises ConfigError, before anything is written where the config alone is wrong, and
    PipelineError when the run cannot go on.
    """
    config = absolute_paths(config)
    check_config(config, inputs)
    model_cache.resolve_model(config.model.path)  # a model that is not there costs no folder
    config = recorded_config(config, inputs)
    if resume:
        folder = run_folder.reopen(config)
    else:
        config, folder = run_folder.create(config)
        run_folder.begin(folder, config)
    with run_folder.held(folder):
        summary = SummarySink(may_run_ahead=_may_run_ahead(config))
        if resume:
            run_folder.keep(folder, config)
            summary.add_records(read_metrics(folder))
        every_sink = [*_run_sinks(config, folder, summary, console=console), *sinks]
        result = _run_in_folder(config, folder, every_sink, resume=resume, inputs=inputs)
    return train_result(result, summary, folder)


def _run_sinks(config: RunConfig, folder: Path, summary: SummarySink, *, console: TextIO | None) -> list[Sink]:
    """The sinks of every run: its files, its trackers, the summary, and the console if there is one."""
    sinks: list[Sink] = [JsonlSink(folder, timeline=config.observe.timeline), summary]
    if console is not None:
        screen = Console(file=console)
        screen.print(f"{folder}: starting engine and learner", highlight=False, markup=False, soft_wrap=True)
        sinks.insert(0, ConsoleSink(screen, steps=config.run.steps, done=summary.step, title=str(folder)))
    return [*sinks, *open_trackers(config, folder, done=summary.step)]


def _run_in_folder(
    config: RunConfig, folder: Path, sinks: Sequence[Sink], *, resume: bool, inputs: RunInputs
) -> RunResult:
    """The run itself. Its sinks are closed, however it ends."""
    stop = anyio.Event()
    try:
        return run_blocking(
            lambda signals: run_training(config, sinks=sinks, resume=resume, inputs=inputs, signals=signals, stop=stop),
            stop=stop,
        )
    except BaseException as error:
        Fanout(sinks).close()
        newest = checkpoint_folder.latest(folder / CHECKPOINTS)
        if newest is not None and not isinstance(error, CheckpointError):
            error.add_note(f"kept up to {newest}; to go on from there: {run_folder.resume_command(folder)}")
        elif isinstance(error, ConfigError) and not resume:
            shutil.rmtree(folder, ignore_errors=True)  # nothing was trained: nothing is left
        elif newest is None:
            error.add_note(f"there is no checkpoint to go on from; what was recorded is in {folder}")
        raise


def _may_run_ahead(config: RunConfig) -> bool:
    """True when a larger staleness.max would let generation run further ahead."""
    return isinstance(config.buffer, Window) and isinstance(config.runtime, Procs) and config.staleness.max > 0


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
    With ``signals``, the first SIGINT, SIGTERM or SIGHUP stops the run at the next version, with a checkpoint; the next after two
    seconds, or one before everything has started, raises Interrupted. Raises PipelineError, or ConfigError for what only the
    model's files could tell.
    """
    checkpoints = run_folder_path(config) / CHECKPOINTS
    newest = checkpoint_folder.latest(checkpoints) if resume else None
    if resume and newest is None:
        raise CheckpointError(f"nothing to resume: {checkpoints} holds no complete checkpoint; begin a new run")
    snapshot = checkpoint_folder.read(newest) if newest else None
    stop, started = stop or anyio.Event(), anyio.Event()
    result: RunResult | None = None
    try:
        async with AsyncExitStack() as stack:
            received = stack.enter_context(receive_stop_signals()) if signals else None
            tasks = await stack.enter_async_context(anyio.create_task_group())
            if received is not None:
                watch = partial(stop_on_signals, received, started=started, stop=stop, sink=Fanout(sinks))
                tasks.start_soon(watch)
            for caution in cautions(config):
                Fanout(sinks).log_event("warning", caution)
            async with open_parts(
                config,
                sinks=sinks,
                folder=checkpoints,
                snapshot=snapshot,
                inputs=inputs,
                logs=run_folder_path(config) / LOGS,
            ) as parts:
                if newest:
                    await parts.learner.load(newest / LEARNER)
                if snapshot:
                    rng.restore_rng_state(snapshot.randomness)
                started.set()
                result = await pipeline.run(parts, snapshot=snapshot, stop=stop)
            tasks.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        raise root_cause(group) from group
    assert result is not None
    return result
