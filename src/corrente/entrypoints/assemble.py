"""RunConfig -> Parts. The only module that names implementations, by dotted path, imported when they are chosen."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from corrente import config as c
from corrente.buffer.base import Buffer
from corrente.common.imports import load_object
from corrente.common.local_spawner import open_local_spawner
from corrente.common.spawn import Spawner
from corrente.config import RunConfig
from corrente.controller import checkpoint_folder
from corrente.controller.parts import Parts
from corrente.controller.plan import Plan
from corrente.controller.snapshot import Snapshot
from corrente.data.types import Sampling
from corrente.entrypoints.checks import check_loaded_prompts
from corrente.entrypoints.inputs import NO_INPUTS, RunInputs
from corrente.inflight.base import InflightPolicy
from corrente.observe.base import Sink
from corrente.observe.fanout import Fanout
from corrente.runtime.base import Runtime
from corrente.staleness import gate
from corrente.staleness.base import StalenessPolicy

RUNTIMES: Mapping[type, str] = {
    c.Inline: "corrente.runtime.inline:InlineRuntime",
    c.Procs: "corrente.runtime.procs:ProcsRuntime",
}
INFLIGHT: Mapping[type, str] = {
    c.Swap: "corrente.inflight.policies:SwapPolicy",
    c.Recompute: "corrente.inflight.policies:RecomputePolicy",
    c.Resume: "corrente.inflight.policies:ResumePolicy",
    c.Drain: "corrente.inflight.policies:DrainPolicy",
    c.Barrier: "corrente.inflight.policies:BarrierPolicy",
    c.Cancel: "corrente.inflight.policies:CancelPolicy",
    c.OldWeights: "corrente.inflight.policies:OldWeightsPolicy",
}
BUFFERS: Mapping[type, str] = {
    c.NoBuffer: "corrente.buffer.none:none",
    c.Double: "corrente.buffer.double:double",
    c.Window: "corrente.buffer.window:WindowBuffer",
    c.Stream: "corrente.buffer.stream:StreamBuffer",
}
PROMPTS = "corrente.prompts.build:build_prompts"
EVAL_PROMPTS = "corrente.prompts.build:build_eval_prompts"
TOKENIZER = "corrente.prompts.tokenizer:Tokenizer"
CHAT = "corrente.prompts.chat:ChatTemplate"
ENV = "corrente.env.build:open_env"
OWN_TEACHER = "corrente.score.teacher:TeacherSlot"
SCORER = "corrente.score.build:open_scorer"
SEES_ENVIRONMENTS = "corrente.score.build:sees_environments"
ALGORITHM = "corrente.algo.grouped:GroupedAlgorithm"
LEARNER = "corrente.runtime.cores:learner"
RESOLVE_MODEL = "corrente.models.cache:resolve_model"
VERIFY_WEIGHTS = "corrente.models.cache:verify_weight_files"
CAUTIONS = "corrente.adapters.checks:cautions"


def derive_plan(config: RunConfig) -> Plan:
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
    given: RunInputs = NO_INPUTS,
    logs: Path | None = None,
    learner: str = LEARNER,
) -> AsyncGenerator[Parts]:
    """Start the workers and yield everything the pipeline needs; on exit the workers are gone.

    ``config`` is checked already. ``folder``: where checkpoints go, None for none. ``given`` replaces what the config says.
    ``logs``: a folder for the logs of all workers. ``learner``: dotted path of what builds the learner's core.
    """
    model = Path(load_object(RESOLVE_MODEL)(config.model.path))
    load_object(VERIFY_WEIGHTS)(model)
    config = msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, path=str(model)))
    tokenizer = load_object(TOKENIZER)(model, trust_remote_code=config.model.trust_remote_code)
    encode, chat = tokenizer.encode, load_object(CHAT)(tokenizer, config.chat)
    prompts = load_object(PROMPTS)(config, encode, chat=chat, passed_dataset=given.train_dataset)
    eval_prompts = load_object(EVAL_PROMPTS)(config, encode, chat=chat, passed_dataset=given.eval_dataset)
    if given.train_dataset is not None or isinstance(config.prompts, c.Dataset):
        check_loaded_prompts(config, prompts.find(["0/0"])[0], given.reward_functions)
    sink, own = Fanout(sinks), load_object(OWN_TEACHER)()
    samplings = {"train": config.sampling, "eval": eval_sampling(config)}
    async with (
        open_local_spawner() as spawner,
        load_object(ENV)(
            config,
            **given.env_objects(),
            chat=chat,
            tokenizer=tokenizer,
            samplings=samplings,
            tell=sink.log_event,
            shown=load_object(SEES_ENVIRONMENTS)(config, given.reward_functions),
        ) as envs,
        load_object(SCORER)(config, functions=given.reward_functions, spawner=spawner, logs=logs, own=own) as scorer,
        _build_runtime(config, learner, spawner, logs).open(config, tell=sink.log_event) as workers,
    ):
        if workers.teacher is not None:
            own.fill(workers.teacher)
        yield Parts(
            plan=derive_plan(config),
            prompts=prompts,
            engine=workers.engine,
            env=envs["train"],
            scorer=scorer,
            buffer=build_buffer(config, first_ticket=snapshot.next_ticket if snapshot else 0),
            staleness=build_staleness(config),
            algorithm=load_object(ALGORITHM)(config),
            learner=workers.learner,
            sync=workers.sync,
            inflight=build_inflight(config),
            sink=sink,
            eval_prompts=eval_prompts,
            eval_env=envs["eval"],
            checkpoints=checkpoint_folder.CheckpointFolder(folder, keep=config.checkpoint.keep) if folder else None,
        )


def _build_runtime(config: RunConfig, learner: str, spawner: Spawner, logs: Path | None) -> Runtime:
    """A runtime whose learner is built in this process is handed the function, another one its name."""
    make = load_object(_of(RUNTIMES, config.runtime))
    if isinstance(config.runtime, c.Inline):
        return make(learner=load_object(learner))
    return make(learner=learner, spawner=spawner, logs=logs)


def build_buffer(config: RunConfig, *, first_ticket: int = 0) -> Buffer:
    """The buffer a config asks for, its slots and window derived by ``staleness.gate``."""
    make = load_object(_of(BUFFERS, config.buffer))
    match config.buffer:
        case c.Window():
            return make(slots=gate.slots(config), window=gate.window(config), first_ticket=first_ticket)
        case c.Stream(inflight=inflight):
            return make(inflight=inflight or 2 * config.run.prompts_per_step, first_ticket=first_ticket)
        case _:
            return make(groups_per_version=gate.groups_per_version(config), first_ticket=first_ticket)


def build_inflight(config: RunConfig) -> InflightPolicy:
    """What a config lets happen to live generations when weights land."""
    make = load_object(_of(INFLIGHT, config.inflight))
    match config.inflight:
        case c.Cancel(max_age=max_age):
            return make(max_age=max_age)
        case _:
            return make()


def build_staleness(config: RunConfig) -> StalenessPolicy:
    """The checks at consumption a config asks for."""
    given = config.staleness
    if given.reject is None and given.mask is None:
        return load_object("corrente.staleness.policies:Accept")()
    return load_object("corrente.staleness.policies:ByVersion")(reject=given.reject, mask=given.mask)


def _of(table: Mapping[type, str], section: object) -> str:
    return table[type(section)]
