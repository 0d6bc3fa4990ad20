"""RunConfig -> Parts. The only module that names implementations, by dotted path, imported when they are chosen."""

from __future__ import annotations

import importlib
import signal
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import msgspec

from corrente import checkpoint, pipeline
from corrente import config as c
from corrente.buffer.base import Buffer
from corrente.config import RunConfig
from corrente.errors import CheckpointError, Interrupted, root_cause
from corrente.inflight.base import InflightPolicy
from corrente.observe.base import Sink
from corrente.observe.fanout import Fanout
from corrente.parts import Outcome, Parts, Plan, Snapshot
from corrente.staleness import gate
from corrente.staleness.base import StalenessPolicy

RUNTIMES: Mapping[type, str] = {
    c.Inline: "corrente.runtime.inline:InlineRuntime",
    c.Procs: "corrente.runtime.procs:ProcsRuntime",
}
INFLIGHT: Mapping[type, str] = {
    c.Swap: "corrente.inflight.policies:Swap",
    c.Recompute: "corrente.inflight.policies:Recompute",
    c.Drain: "corrente.inflight.policies:Drain",
    c.Barrier: "corrente.inflight.policies:Barrier",
}
BUFFERS: Mapping[type, str] = {
    c.NoBuffer: "corrente.buffer.none:none",
    c.Double: "corrente.buffer.double:double",
    c.Window: "corrente.buffer.window:WindowBuffer",
    c.Stream: "corrente.buffer.stream:StreamBuffer",
}
PROMPTS = "corrente.prompts.build:build"
EVAL_PROMPTS = "corrente.prompts.build:build_eval"
TOKENIZER = "corrente.prompts.tokenizer:Tokenizer"
ENV = "corrente.env.single:SingleTurn"
SCORER = "corrente.score.functions:build"
ALGORITHM = "corrente.algo.grouped:GroupedAlgorithm"
RESOLVE_MODEL = "corrente.models:resolve"


def run_folder(config: RunConfig) -> Path:
    """Where a run writes: run.dir / run.name."""
    return Path(config.run.dir) / config.run.name


def plan(config: RunConfig) -> Plan:
    """The numbers of a run; nothing is chosen here, only derived."""
    return Plan(
        steps=config.run.steps,
        prompts_per_step=config.run.prompts_per_step,
        group_size=config.run.group_size,
        seed=config.run.seed,
        publish_every=config.sync.every,
        publish_retries=config.sync.retries,
        max_age=gate.max_age(config),
        checkpoint_every=config.checkpoint.every,
        samples_per_step=config.observe.samples,
        limits=config.limits,
        filter=config.filter,
        eval=config.eval,
    )


@asynccontextmanager
async def open_parts(
    config: RunConfig,
    *,
    sinks: Sequence[Sink] = (),
    folder: Path | None = None,
    snapshot: Snapshot | None = None,
    reward_functions: Sequence[Callable[..., Any]] = (),
) -> AsyncGenerator[Parts]:
    """Start the workers and yield everything the pipeline needs; on exit the workers are gone.

    ``config`` is checked already. ``folder``: where checkpoints go, None for none. ``reward_functions`` replace the config's.
    """
    model = Path(_find(RESOLVE_MODEL)(config.model.path))
    config = msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, path=str(model)))
    encode = _find(TOKENIZER)(model).encode
    prompts = _find(PROMPTS)(config, encode)
    eval_prompts = _find(EVAL_PROMPTS)(config, encode)
    async with _find(_of(RUNTIMES, config.runtime))().open(config) as workers:
        yield Parts(
            plan=plan(config),
            prompts=prompts,
            engine=workers.engine,
            env=_find(ENV)(config.sampling),
            scorer=_scorer(config, reward_functions),
            buffer=build_buffer(config, first_ticket=snapshot.next_ticket if snapshot else 0),
            staleness=build_staleness(config),
            algorithm=_find(ALGORITHM)(config),
            learner=workers.learner,
            sync=workers.sync,
            inflight=build_inflight(config),
            sink=Fanout(sinks),
            eval_prompts=eval_prompts,
            eval_env=_find(ENV)(msgspec.structs.replace(config.sampling, temperature=config.eval.temperature)),
            checkpoints=checkpoint.CheckpointFolder(folder, keep=config.checkpoint.keep) if folder else None,
        )


async def main(
    config: RunConfig,
    *,
    sinks: Sequence[Sink] = (),
    resume: bool = False,
    reward_functions: Sequence[Callable[..., Any]] = (),
    signals: bool = True,
) -> Outcome:
    """Run ``config`` to its end in its run folder. ``resume``: go on from the newest complete checkpoint there.

    With ``signals``, the first SIGINT or SIGTERM stops the run at the next version, with a checkpoint; the second raises
    Interrupted. Raises PipelineError, or ConfigError for what only the model's files could tell.
    """
    checkpoints = run_folder(config) / "checkpoints"
    newest = checkpoint.latest(checkpoints) if resume else None
    if resume and newest is None:
        raise CheckpointError(f"nothing to resume: {checkpoints} holds no complete checkpoint")
    snapshot = checkpoint.read(newest) if newest else None
    stop = anyio.Event()
    outcome: Outcome | None = None
    try:
        async with anyio.create_task_group() as tasks:
            if signals:
                tasks.start_soon(_heed_signals, stop, Fanout(sinks))
            async with open_parts(
                config, sinks=sinks, folder=checkpoints, snapshot=snapshot, reward_functions=reward_functions
            ) as parts:
                if newest:
                    await parts.learner.load(newest / checkpoint.LEARNER)
                outcome = await pipeline.run(parts, snapshot=snapshot, stop=stop)
            tasks.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        raise root_cause(group) from group
    assert outcome is not None
    return outcome


async def _heed_signals(stop: anyio.Event, sink: Sink) -> None:
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async for _ in signals:
            if stop.is_set():
                raise Interrupted("asked twice to stop")
            sink.event("warning", "stopping at the next version, with a checkpoint; once more to stop at once, without")
            stop.set()


def build_buffer(config: RunConfig, *, first_ticket: int = 0) -> Buffer:
    """The buffer a config asks for, its slots and window derived by ``staleness.gate``."""
    make = _find(_of(BUFFERS, config.buffer))
    match config.buffer:
        case c.Window():
            return make(slots=gate.slots(config), window=gate.window(config), first_ticket=first_ticket)
        case c.Stream(inflight=inflight):
            return make(inflight=inflight or 2 * config.run.prompts_per_step, first_ticket=first_ticket)
        case _:
            return make(groups_per_version=gate.groups_per_version(config), first_ticket=first_ticket)


def build_inflight(config: RunConfig) -> InflightPolicy:
    """What a config lets happen to live generations when weights land."""
    return _find(_of(INFLIGHT, config.inflight))()


def _scorer(config: RunConfig, functions: Sequence[Callable[..., Any]]) -> Any:
    if not functions:
        return _find(SCORER)(config.reward)
    return _find("corrente.score.functions:FunctionScorer")(
        functions, weights=config.reward.weights, deadline_s=config.reward.deadline_s
    )


def build_staleness(config: RunConfig) -> StalenessPolicy:
    """The checks at consumption a config asks for."""
    given = config.staleness
    if given.reject is None and given.mask is None:
        return _find("corrente.staleness.policies:Accept")()
    return _find("corrente.staleness.policies:ByVersion")(reject=given.reject, mask=given.mask)


def _of(table: Mapping[type, str], section: object) -> str:
    return table[type(section)]


def _find(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)
