"""Makes the Parts of a run from a RunConfig: workers are started, stages are built, the numbers of the run are derived.

Which class implements a ``kind`` is said in the axis' own folder (``KINDS`` in buffer, inflight and runtime; the ``build`` and
``open`` functions of the stages). What needs torch is imported in the function that uses it, so that a wrong config is refused
before torch is imported.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from corrente import buffer, inflight, runtime
from corrente import config as c
from corrente.buffer.base import Buffer, BufferSize
from corrente.common.imports import load_object
from corrente.common.local_spawner import open_local_spawner
from corrente.common.spawn import Spawner
from corrente.config import RunConfig
from corrente.controller import checkpoint_folder
from corrente.controller.parts import Parts
from corrente.controller.plan import Plan
from corrente.controller.snapshot import Snapshot
from corrente.data.types import Prompt, Sampling
from corrente.entrypoints.checks import check_loaded_prompts
from corrente.entrypoints.inputs import NO_INPUTS, RunInputs
from corrente.inflight.base import InflightPolicy
from corrente.observe.base import Sink
from corrente.observe.fanout import Fanout
from corrente.prompts.base import Prompts
from corrente.score.base import Scorer
from corrente.staleness import gate, policies

LEARNER = "corrente.runtime.cores:learner"
"""Builds the learner that trains; an evaluation has one that only sends its weights in its place."""


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
    """The sampling of held-out prompts: that of training, except for what ``eval`` sets."""
    section = config.eval
    several = config.sampling.temperature if section.samples > 1 else 0.0
    return msgspec.structs.replace(
        config.sampling,
        temperature=several if section.temperature is None else section.temperature,
        top_k=section.top_k,
        top_p=section.top_p,
        min_p=section.min_p,
        keep_support=False,
        max_tokens=section.max_tokens or config.sampling.max_tokens,
    )


@asynccontextmanager
async def open_parts(
    config: RunConfig,
    *,
    sinks: Sequence[Sink] = (),
    folder: Path | None = None,
    snapshot: Snapshot | None = None,
    inputs: RunInputs = NO_INPUTS,
    logs: Path | None = None,
    learner: str = LEARNER,
) -> AsyncGenerator[Parts]:
    """Start the workers and yield everything the pipeline needs; on exit the workers are gone.

    ``config`` is checked already (checks.check_config). ``folder``: where checkpoints go; None: no checkpoints. ``snapshot``:
    the checkpoint that the run goes on from. ``inputs`` replace what the config names. ``logs``: a folder for the logs of all
    workers. ``learner``: dotted path of the function that builds the learner's core. Raises ConfigError for what only the model
    or the data can tell, PipelineError for a worker that does not start.
    """
    from corrente.algo.grouped import GroupedAlgorithm

    config = _with_model(config)
    text = _text(config, inputs)
    sink = Fanout(sinks)
    make_runtime = load_object(runtime.KINDS[type(config.runtime)])
    async with (
        open_local_spawner() as spawner,
        _open_envs(config, inputs, text, sink) as envs,
        _open_scorer(config, inputs, spawner, logs) as (scorer, self_teacher),
        make_runtime(learner=learner, spawner=spawner, logs=logs).open(config, log_event=sink.log_event) as workers,
    ):
        if workers.teacher is not None:
            self_teacher.fill(workers.teacher)
        yield Parts(
            plan=derive_plan(config),
            prompts=text.prompts,
            engine=workers.engine,
            env=envs["train"],
            scorer=scorer,
            buffer=build_buffer(config, first_ticket=snapshot.next_ticket if snapshot else 0),
            staleness=policies.build(config.staleness),
            algorithm=GroupedAlgorithm(config),
            learner=workers.learner,
            sync=workers.sync,
            inflight=build_inflight(config),
            sink=sink,
            eval_prompts=text.eval_prompts,
            eval_env=envs["eval"],
            checkpoints=checkpoint_folder.CheckpointFolder(folder, keep=config.checkpoint.keep) if folder else None,
        )


class _Text(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The tokenizer, the chat template, and the prompts that were made with them."""

    tokenizer: Any
    chat: Any
    prompts: Prompts
    eval_prompts: tuple[Prompt, ...]


def _with_model(config: RunConfig) -> RunConfig:
    """The config with the directory of its model in place of a name. Raises ConfigError when it has no weights."""
    from corrente.models.cache import resolve_model, verify_weight_files

    model = Path(resolve_model(config.model.path))
    verify_weight_files(model)
    return msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, path=str(model)))


def _text(config: RunConfig, inputs: RunInputs) -> _Text:
    """Prompts for training and evaluation. Raises ConfigError when a reward asks for a column that a dataset lacks."""
    from corrente.prompts.build import build_eval_prompts, build_prompts
    from corrente.prompts.chat import ChatTemplate
    from corrente.prompts.tokenizer import Tokenizer

    tokenizer = Tokenizer(Path(config.model.path), trust_remote_code=config.model.trust_remote_code)
    chat = ChatTemplate(tokenizer, config.chat)
    environments, opens = inputs.environment_names, inputs.environment_opens(config)
    how: dict[str, Any] = {"chat": chat, "environments": environments, "opens": opens}
    prompts = build_prompts(config, tokenizer.encode, passed_dataset=inputs.train_dataset, **how)
    eval_prompts = build_eval_prompts(config, tokenizer.encode, passed_dataset=inputs.eval_dataset, **how)
    if inputs.train_dataset is not None or isinstance(config.prompts, c.Dataset):
        check_loaded_prompts(config, prompts.find_prompts(["0/0"])[0], inputs.reward_functions)
    return _Text(tokenizer=tokenizer, chat=chat, prompts=prompts, eval_prompts=eval_prompts)


def _open_envs(config: RunConfig, inputs: RunInputs, text: _Text, sink: Sink) -> AbstractAsyncContextManager[Any]:
    """The environments of training ("train") and of evaluation ("eval"), which differ in their sampling."""
    from corrente.env.build import open_env
    from corrente.score.build import sees_environments

    shown = sees_environments(config, inputs.reward_functions)
    return open_env(
        config,
        **inputs.env_objects(),
        chat=text.chat,
        tokenizer=text.tokenizer,
        samplings={"train": config.sampling, "eval": eval_sampling(config)},
        log_event=sink.log_event,
        shown=shown,
    )


@asynccontextmanager
async def _open_scorer(
    config: RunConfig, inputs: RunInputs, spawner: Spawner, logs: Path | None
) -> AsyncGenerator[tuple[Scorer, Any]]:
    """The scorer, and the place in it for a teacher that the runtime starts (reward.scorers of kind self_teacher)."""
    from corrente.score.build import open_scorer
    from corrente.score.teacher import TeacherSlot

    self_teacher = TeacherSlot()
    async with open_scorer(
        config, functions=inputs.reward_functions, spawner=spawner, logs=logs, own=self_teacher
    ) as scorer:
        yield scorer, self_teacher


def build_buffer(config: RunConfig, *, first_ticket: int = 0) -> Buffer:
    """The buffer a config asks for, of the size that ``staleness.gate`` derives."""
    size = BufferSize(
        groups_per_version=gate.groups_per_version(config),
        slots=gate.slots(config),
        window=gate.window(config),
        generating=gate.generating(config),
    )
    return load_object(buffer.KINDS[type(config.buffer)])(size, first_ticket=first_ticket)


def build_inflight(config: RunConfig) -> InflightPolicy:
    """The policy for live generations when weights land."""
    section = config.inflight
    return load_object(inflight.KINDS[type(section)])(**msgspec.structs.asdict(section))
