"""Evaluate weights on held-out prompts without training: a checkpoint of a run, a model directory, or what a config names.

    evaluate(config)                 engines, environments and rewards as in a run; in the learner's place only its weights
    of_checkpoint(config, folder)    the config with the weights of a checkpoint
    of_model(config, folder)         the config with the weights of a Hugging Face or peft directory

Nothing is written where a run may be writing: an evaluation has a folder of its own while it lasts, so it can be made beside a
run that goes on.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

import anyio
import msgspec

from corrente import config as c
from corrente.config import RunConfig
from corrente.controller.checkpoint_folder import LEARNER
from corrente.controller.evaluator import Evaluation, Evaluator
from corrente.controller.parts import Parts
from corrente.controller.publisher import Publisher
from corrente.controller.request_gate import RequestGate
from corrente.controller.run_state import RunState
from corrente.controller.watchdog import watch
from corrente.entrypoints.assemble import open_parts
from corrente.entrypoints.inputs import NO_INPUTS, RunInputs
from corrente.errors import ConfigError, root_cause
from corrente.observe.base import Sink

WEIGHTS = "corrente.learner.weights:WeightsCore"
PEFT = "adapter_config.json"


def config_of_checkpoint(config: RunConfig, folder: Path) -> RunConfig:
    """``folder``: a complete checkpoint of a run with these settings."""
    learner = str(folder / LEARNER)
    if isinstance(config.adapters, c.Full):
        return msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, path=learner))
    return msgspec.structs.replace(config, adapters=msgspec.structs.replace(config.adapters, init=learner))


def config_of_model(config: RunConfig, folder: Path) -> RunConfig:
    """``folder`` holds a whole model, or an adapter to ``config.model``. Raises ConfigError."""
    if not folder.is_dir():
        raise ConfigError(f"--model {folder}: it must be a directory with a model or with a peft adapter")
    if not (folder / PEFT).is_file():
        model = msgspec.structs.replace(config.model, path=str(folder))
        return msgspec.structs.replace(config, model=model, adapters=c.Full())
    try:
        given = json.loads((folder / PEFT).read_text(encoding="utf-8"))
        targets, parameters = given["target_modules"], given.get("target_parameters") or ()
        adapters = c.Lora(
            rank=int(given["r"]),
            alpha=float(given["lora_alpha"]),
            targets=(targets,) if isinstance(targets, str) else tuple(targets or ()),
            target_parameters=tuple(parameters),
            init=str(folder),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"--model {folder}: {PEFT} cannot be read: {error!r}") from error
    if isinstance(config.adapters, c.LoraMerged):
        merged = {name: getattr(adapters, name) for name in adapters.__struct_fields__}
        return msgspec.structs.replace(config, adapters=c.LoraMerged(**merged))
    return msgspec.structs.replace(config, adapters=adapters)


async def run_evaluation(
    config: RunConfig, *, inputs: RunInputs = NO_INPUTS, sinks: Sequence[Sink] = (), step: int = 0, version: int = 0
) -> Evaluation:
    """Play the held-out prompts of ``config`` with its weights, as ``eval`` says, and return what came of it.

    ``inputs`` replace what the config names. ``step`` and ``version`` are labels. What an evaluation loses is counted in it; an
    engine that cannot work raises PipelineError. ConfigError: there is nothing to evaluate on.
    """
    with tempfile.TemporaryDirectory(prefix="corrente-eval-") as aside:
        settings = _apart(config, aside)
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
    publisher = Publisher(parts, valve=gate, journal=state.journal)
    evaluator = Evaluator(parts, state, gate=gate)
    evaluator.use_whole_engine()
    evaluation: Evaluation | None = None
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watch, state.journal, parts)
            await publisher.land(await publisher.stage(version))
            evaluation = await evaluator.run(step=step, version=version)
            tasks.cancel_scope.cancel()
    finally:
        parts.sink.close()
    assert evaluation is not None
    return evaluation


def _apart(config: RunConfig, folder: str) -> RunConfig:
    """The config of an evaluation: it collides with no run, and is never switched off."""
    sync = config.sync
    if isinstance(config.engine, c.Embedded):
        sync = c.Inproc() if isinstance(config.runtime, c.Inline) else c.Shm()
    elif isinstance(sync, c.Disk):
        sync = msgspec.structs.replace(sync, path="")
    elif isinstance(sync, c.Http) and not config.engine.urls:
        sync = msgspec.structs.replace(sync, port=0)
    return msgspec.structs.replace(
        config,
        run=msgspec.structs.replace(config.run, dir=folder),
        pool=msgspec.structs.replace(config.pool, join=False),
        eval=msgspec.structs.replace(config.eval, every=config.eval.every or 1),
        sync=sync,
    )
