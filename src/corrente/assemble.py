"""RunConfig -> Parts. The only module that names implementations, by dotted path, imported when they are chosen."""

from __future__ import annotations

import signal
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import msgspec

from corrente import checkpoint, checks, pipeline, randomness
from corrente import config as c
from corrente.buffer.base import Buffer
from corrente.config import RunConfig
from corrente.dotted import load
from corrente.errors import CheckpointError, Interrupted, root_cause
from corrente.given import NOTHING, Given
from corrente.inflight.base import InflightPolicy
from corrente.observe.base import Sink
from corrente.observe.fanout import Fanout
from corrente.parts import Outcome, Parts, Plan, Snapshot
from corrente.settling import STOPS
from corrente.staleness import gate
from corrente.staleness.base import StalenessPolicy
from corrente.types import Sampling

RUNTIMES: Mapping[type, str] = {
    c.Inline: "corrente.runtime.inline:InlineRuntime",
    c.Procs: "corrente.runtime.procs:ProcsRuntime",
}
INFLIGHT: Mapping[type, str] = {
    c.Swap: "corrente.inflight.policies:Swap",
    c.Recompute: "corrente.inflight.policies:Recompute",
    c.Resume: "corrente.inflight.policies:Resume",
    c.Drain: "corrente.inflight.policies:Drain",
    c.Barrier: "corrente.inflight.policies:Barrier",
    c.Cancel: "corrente.inflight.policies:Cancel",
    c.Snapshot: "corrente.inflight.policies:Snapshot",
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
CHAT = "corrente.prompts.chat:ChatTemplate"
ENV = "corrente.env.build:open_env"
OWN_TEACHER = "corrente.score.teacher:Borrowed"
SCORER = "corrente.score.build:open_scorer"
SEES_ENVIRONMENTS = "corrente.score.build:sees_environments"
ALGORITHM = "corrente.algo.grouped:GroupedAlgorithm"
LEARNER = "corrente.runtime.cores:learner"
RESOLVE_MODEL = "corrente.models:resolve"
VERIFY_WEIGHTS = "corrente.models:verify_weights"
CAUTIONS = "corrente.adapters.checks:cautions"


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
        window=gate.window(config),
        checkpoint_every=config.checkpoint.every,
        samples_per_step=config.observe.samples,
        limits=config.limits,
        filter=config.filter,
        eval=config.eval,
        alarm=config.alarm,
    )


def eval_sampling(config: RunConfig) -> Sampling:
    """How held-out prompts are sampled: as in training, but for what ``eval`` says."""
    given = config.eval
    several = config.sampling.temperature if given.samples > 1 else 0.0
    return msgspec.structs.replace(
        config.sampling,
        temperature=several if given.temperature is None else given.temperature,
        top_k=given.top_k,
        top_p=given.top_p,
        min_p=given.min_p,
        keep_support=False,
        max_tokens=given.max_tokens or config.sampling.max_tokens,
    )


@asynccontextmanager
async def open_parts(
    config: RunConfig,
    *,
    sinks: Sequence[Sink] = (),
    folder: Path | None = None,
    snapshot: Snapshot | None = None,
    given: Given = NOTHING,
    learner: str = LEARNER,
) -> AsyncGenerator[Parts]:
    """Start the workers and yield everything the pipeline needs; on exit the workers are gone.

    ``config`` is checked already. ``folder``: where checkpoints go, None for none. ``given`` replaces what the config says.
    ``learner``: dotted path of what builds the learner's core.
    """
    model = Path(load(RESOLVE_MODEL)(config.model.path))
    load(VERIFY_WEIGHTS)(model)
    config = msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, path=str(model)))
    tokenizer = load(TOKENIZER)(model)
    encode, chat = tokenizer.encode, load(CHAT)(tokenizer, config.chat)
    prompts = load(PROMPTS)(config, encode, chat=chat, brought=given.train_dataset)
    eval_prompts = load(EVAL_PROMPTS)(config, encode, chat=chat, brought=given.eval_dataset)
    if given.train_dataset is not None or isinstance(config.prompts, c.Dataset):
        checks.loaded(config, prompts.find(["0/0"])[0], given.reward_functions)
    sink = Fanout(sinks)
    inline = isinstance(config.runtime, c.Inline)
    runtime = load(_of(RUNTIMES, config.runtime))(learner=load(learner) if inline else learner)
    logs, own = run_folder(config) / "logs", load(OWN_TEACHER)()
    samplings = {"train": config.sampling, "eval": eval_sampling(config)}
    shown = load(SEES_ENVIRONMENTS)(config, given.reward_functions)
    async with (
        load(ENV)(
            config, given=given, chat=chat, tokenizer=tokenizer, samplings=samplings, tell=sink.event, shown=shown
        ) as envs,
        load(SCORER)(config, functions=given.reward_functions, logs=logs, own=own) as scorer,
        runtime.open(config, tell=sink.event) as workers,
    ):
        if workers.teacher is not None:
            own.lend(workers.teacher)
        yield Parts(
            plan=plan(config),
            prompts=prompts,
            engine=workers.engine,
            env=envs["train"],
            scorer=scorer,
            buffer=build_buffer(config, first_ticket=snapshot.next_ticket if snapshot else 0),
            staleness=build_staleness(config),
            algorithm=load(ALGORITHM)(config),
            learner=workers.learner,
            sync=workers.sync,
            inflight=build_inflight(config),
            sink=sink,
            eval_prompts=eval_prompts,
            eval_env=envs["eval"],
            checkpoints=checkpoint.CheckpointFolder(folder, keep=config.checkpoint.keep) if folder else None,
        )


async def main(
    config: RunConfig,
    *,
    sinks: Sequence[Sink] = (),
    resume: bool = False,
    given: Given = NOTHING,
    signals: bool = True,
    stop: anyio.Event | None = None,
) -> Outcome:
    """Run ``config`` to its end in its run folder. ``resume``: go on from the newest complete checkpoint there.

    ``given`` replaces what the config says. Once ``stop`` is set the run ends at the next version, with a checkpoint.
    With ``signals``, the first SIGINT, SIGTERM or SIGHUP stops the run at the next version, with a checkpoint; the second, or one
    before everything has started, raises Interrupted. Raises PipelineError, or ConfigError for what only the model's files
    could tell.
    """
    checkpoints = run_folder(config) / "checkpoints"
    newest = checkpoint.latest(checkpoints) if resume else None
    if resume and newest is None:
        raise CheckpointError(f"nothing to resume: {checkpoints} holds no complete checkpoint; run it without --resume")
    snapshot = checkpoint.read(newest) if newest else None
    stop, started = stop or anyio.Event(), anyio.Event()
    outcome: Outcome | None = None
    try:
        async with anyio.create_task_group() as tasks:
            if signals:
                tasks.start_soon(_heed_signals, started, stop, Fanout(sinks))
            for caution in load(CAUTIONS)(config):
                Fanout(sinks).event("warning", caution)
            async with open_parts(config, sinks=sinks, folder=checkpoints, snapshot=snapshot, given=given) as parts:
                if newest:
                    await parts.learner.load(newest / checkpoint.LEARNER)
                if snapshot:
                    randomness.restore(snapshot.randomness)
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


def build_buffer(config: RunConfig, *, first_ticket: int = 0) -> Buffer:
    """The buffer a config asks for, its slots and window derived by ``staleness.gate``."""
    make = load(_of(BUFFERS, config.buffer))
    match config.buffer:
        case c.Window():
            return make(slots=gate.slots(config), window=gate.window(config), first_ticket=first_ticket)
        case c.Stream(inflight=inflight):
            return make(inflight=inflight or 2 * config.run.prompts_per_step, first_ticket=first_ticket)
        case _:
            return make(groups_per_version=gate.groups_per_version(config), first_ticket=first_ticket)


def build_inflight(config: RunConfig) -> InflightPolicy:
    """What a config lets happen to live generations when weights land."""
    make = load(_of(INFLIGHT, config.inflight))
    match config.inflight:
        case c.Cancel(max_age=max_age):
            return make(max_age=max_age)
        case _:
            return make()


def build_staleness(config: RunConfig) -> StalenessPolicy:
    """The checks at consumption a config asks for."""
    given = config.staleness
    if given.reject is None and given.mask is None:
        return load("corrente.staleness.policies:Accept")()
    return load("corrente.staleness.policies:ByVersion")(reject=given.reject, mask=given.mask)


def _of(table: Mapping[type, str], section: object) -> str:
    return table[type(section)]
