"""Evaluate weights on held-out prompts without training.

    evaluate(target)          from code that is not async: a run's folder, a config file or a RunConfig
    run_evaluation(config)    the evaluation alone, inside an event loop

Engines, environments and rewards are those of a run; in the learner's place stand only its weights. Nothing is written where a
run may be writing: an evaluation has a folder of its own while it lasts, so it may be made beside a run that goes on.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import msgspec

from corrente import config as c
from corrente.config import RunConfig
from corrente.controller.evaluator import Evaluation, Evaluator
from corrente.controller.parts import Parts
from corrente.controller.publisher import Publisher
from corrente.controller.request_gate import RequestGate
from corrente.controller.run_state import RunState
from corrente.controller.watchdog import watch
from corrente.entrypoints.assemble import open_parts
from corrente.entrypoints.blocking import run_blocking
from corrente.entrypoints.checks import check_config
from corrente.entrypoints.eval_target import EvalTarget, add_to_record, find_target, hold_servers
from corrente.entrypoints.inputs import NO_INPUTS, RunInputs
from corrente.errors import ConfigError, PipelineError, root_cause
from corrente.models import cache as model_cache
from corrente.observe.base import Sink
from corrente.sync.kinds import transport_of

WEIGHTS = "corrente.learner.weights:WeightsCore"
"""In the learner's place: it can send its weights, and takes no step."""


def evaluate(
    target: RunConfig | str | Path,
    *,
    overrides: Sequence[str] = (),
    checkpoint: str | None = None,
    model: str | Path | None = None,
    out: str | Path | None = None,
    inputs: RunInputs = NO_INPUTS,
    sinks: Sequence[Sink] = (),
) -> Evaluation:
    """Play held-out prompts with the weights of ``target`` and return the numbers, as `corrente eval` does.

    ``target``: the folder of a run, of which the newest checkpoint is evaluated, or ``checkpoint``, such as "step-000050"; or a
    config file or RunConfig, of which ``model.path`` is. ``model``: evaluate this directory, a model or a peft adapter, with the
    settings of ``target``. ``overrides``: ``key=value`` for the config in a file. ``out``: a file to which the result is added as
    a line of JSON; by default RUN/eval.jsonl for a run, none otherwise. ``inputs`` replace what the config names.

    Raises ConfigError for a wrong setting, and PipelineError when the engine cannot work or every sample was lost.
    """
    found = find_target(target, overrides=overrides, checkpoint=checkpoint, model=model, out=out, inputs=inputs)
    check_config(found.config, _for_evaluation(inputs))
    return evaluate_target(found, inputs=inputs, sinks=sinks)


def evaluate_target(target: EvalTarget, *, inputs: RunInputs = NO_INPUTS, sinks: Sequence[Sink] = ()) -> Evaluation:
    """Evaluate ``target``, whose config is checked already, and add the result to its record. Raises as ``evaluate`` does."""
    model_cache.resolve_model(target.config.model.path)
    with hold_servers(target):
        evaluation = run_blocking(
            lambda _: run_evaluation(
                target.config,
                inputs=_for_evaluation(inputs),
                sinks=sinks,
                step=target.step,
                version=target.version,
            )
        )
    add_to_record(target, evaluation)
    if not evaluation.metrics["eval/episodes"]:
        lost = evaluation.metrics["eval/lost"]
        raise PipelineError(f"all {lost:.0f} completions were lost; the first: {evaluation.error}")
    return evaluation


def _for_evaluation(inputs: RunInputs) -> RunInputs:
    """``inputs`` with held-out prompts in the place of training prompts where those are missing: parts are opened with both, and
    an evaluation draws none of the latter."""
    held_out = inputs.eval_dataset
    if inputs.train_dataset is not None or held_out is None:
        return inputs
    first = next(iter(held_out.values()), held_out) if isinstance(held_out, Mapping) else held_out
    return msgspec.structs.replace(inputs, train_dataset=first)


async def run_evaluation(
    config: RunConfig, *, inputs: RunInputs = NO_INPUTS, sinks: Sequence[Sink] = (), step: int = 0, version: int = 0
) -> Evaluation:
    """Play the held-out prompts of ``config`` with its weights, as ``eval`` says, and return the result.

    ``inputs`` replace what the config names. ``step`` and ``version`` are labels. Samples that are lost are counted in the
    result; raises PipelineError when an engine cannot work, and ConfigError when there are no held-out prompts.
    """
    with tempfile.TemporaryDirectory(prefix="corrente-eval-") as aside:
        settings = config_beside_run(config, aside)
        try:
            async with open_parts(settings, sinks=sinks, inputs=inputs, learner=WEIGHTS) as parts:
                if not parts.eval_prompts:
                    raise ConfigError(
                        "there are no held-out prompts: give prompts.eval_path, or a source of prompts that holds some out"
                    )
                return await _evaluate(parts, step=step, version=version)
        except BaseExceptionGroup as group:
            raise root_cause(group) from group


async def _evaluate(parts: Parts, *, step: int, version: int) -> Evaluation:
    state, gate = RunState(parts), RequestGate(parts.engine.abort)
    publisher = Publisher(parts, request_gate=gate, journal=state.journal)
    evaluator = Evaluator(parts, state, gate=gate)
    evaluator.use_whole_engine()
    evaluation: Evaluation | None = None
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(watch, state.journal, parts, players=(evaluator.player,)))
            await publisher.publish(version)
            evaluation = await evaluator.run(step=step, version=version)
            tasks.cancel_scope.cancel()
    finally:
        parts.sink.close()
    assert evaluation is not None
    return evaluation


def config_beside_run(config: RunConfig, folder: str) -> RunConfig:
    """The config of an evaluation: it collides with no run, and is never switched off."""
    sync: Any = config.sync
    if isinstance(config.engine, c.Embedded):
        sync = c.Inproc() if isinstance(config.runtime, c.Inline) else c.Shm()
    else:
        sync = transport_of(sync).beside_run(sync, bool(config.engine.urls))
    return msgspec.structs.replace(
        config,
        run=msgspec.structs.replace(config.run, dir=folder),
        pool=msgspec.structs.replace(config.pool, join=False),
        eval=msgspec.structs.replace(config.eval, every=config.eval.every or 1),
        sync=sync,
    )
