"""Builds a scorer from a config's ``reward`` section, with its processes started and its models loaded while it is open."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
from anyio.abc import TaskGroup

from corrente.config import RunConfig
from corrente.config import rewards as s
from corrente.score import vocabulary
from corrente.score.base import Source
from corrente.score.combined import CombinedScorer, ScorerTerms
from corrente.score.endpoint import Endpoint
from corrente.score.functions import FunctionSource, Offload, RunProgress, concurrent_calls, function_members
from corrente.score.judge import JudgeScale, JudgeSource
from corrente.score.models import ModelProcess, ProcessRewardSource, RewardModelSource
from corrente.score.processes import ProcessSource
from corrente.score.resolve import accepted_arguments, function_name, resolve_function
from corrente.score.served import ServedTeacher
from corrente.score.teacher import Teacher, TeacherSlot, TeacherSource

DEADLINE_KEY = "deadline_s of its [[reward.scorers]]"
TOKEN_VARIABLE = "CORRENTE_JUDGE_TOKEN"

NETWORKS = "corrente.score.networks"


@asynccontextmanager
async def open_scorer(
    config: RunConfig,
    *,
    functions: Sequence[Callable[..., Any]] = (),
    offload: Offload | None = None,
    logs: Path | None = None,
    own: Teacher | None = None,
) -> AsyncIterator[CombinedScorer]:
    """Open the scorer that a config asks for.

    ``functions`` replace reward.functions. ``logs``: a folder for the standard output and error of processes.
    ``own``: the policy of some versions ago, for a scorer of kind self_teacher. On exit all processes are gone. ConfigError for
    what cannot be imported or loaded.
    """
    reward = config.reward
    updates = config.algo.num_iterations
    progress = RunProgress(every=config.sync.every * updates, max_steps=config.run.steps * updates)
    listed = function_members(
        functions or [resolve_function(name) for name in reward.functions],
        weights=reward.weights,
        deadline_s=reward.deadline_s,
        offload=offload,
        state_of=progress,
    )
    builder = _ScorerBuilder(config, progress=progress, offload=offload, logs=logs, own=own or TeacherSlot())
    named = list(zip(scorer_names(config, [source.name for source, _ in listed]), reward.scorers, strict=True))
    try:
        async with anyio.create_task_group() as running:
            more = [(builder.build_source(scorer, name), scorer_terms(scorer)) for name, scorer in named]
            combined = CombinedScorer([*listed, *more])
            await builder.start(running)
            yield combined
            running.cancel_scope.cancel()
    finally:
        with anyio.CancelScope(shield=True):
            await builder.close()


def sees_environments(config: RunConfig, functions: Sequence[Callable[..., Any]] = ()) -> bool:
    """True if a function takes ``environments``, or any argument. ``functions`` replace reward.functions."""
    listed = [*(functions or map(resolve_function, config.reward.functions))]
    listed += [
        resolve_function(scorer.function) for scorer in config.reward.scorers if isinstance(scorer, s.FunctionScorer)
    ]
    return any((takes := accepted_arguments(function)) is None or "environments" in takes for function in listed)


class _ScorerBuilder:
    """Builds sources, and starts and stops their processes and connections."""

    def __init__(
        self, config: RunConfig, *, progress: RunProgress, offload: Offload | None, logs: Path | None, own: Teacher
    ) -> None:
        self._config, self._progress, self._offload, self._logs, self._own = config, progress, offload, logs, own
        self._processes: list[ProcessSource] = []
        self._models: list[ModelProcess] = []
        self._servers: list[JudgeSource | ServedTeacher] = []

    def build_source(self, scorer: s.ScorerConfig, name: str) -> Source:
        """Build the source of a table of reward.scorers, not started yet."""
        match scorer:
            case s.FunctionScorer():
                function = functools.partial(resolve_function(scorer.function), **scorer.options)
                return FunctionSource(
                    function, name=name, offload=self._offload, state_of=self._progress, at_once=scorer.at_once
                )
            case s.ProcessScorer():
                self._processes.append(self._process_source(scorer, name))
                return self._processes[-1]
            case s.JudgeScorer():
                judge = _judge_source(scorer, name)
                self._servers.append(judge)
                return judge
            case s.RewardModelScorer():
                options = {"chat": scorer.chat, "label": scorer.label}
                return RewardModelSource(self._model_process("reward_model", scorer, name, options))
            case s.ProcessRewardScorer():
                options = {
                    "tokenizer": self._config.model.path,
                    "delimiter": scorer.delimiter,
                    "separator": scorer.separator,
                    "label": scorer.label,
                }
                return ProcessRewardSource(
                    self._model_process("process_model", scorer, name, options), aggregate=scorer.aggregate
                )
            case s.TeacherScorer():
                temperature = s.temperature_of(scorer, sampling=self._config.sampling.temperature)
                options = {"tokenizer": self._config.model.path, "temperature": temperature}
                return self._teacher_source(
                    self._model_process("teacher", scorer, name, options, top=scorer.top), scorer, name
                )
            case s.ServedTeacherScorer():
                served = _served_teacher(scorer, name)
                self._servers.append(served)
                return self._teacher_source(served, scorer, name)
            case s.SelfTeacherScorer():
                return self._teacher_source(self._own, scorer, name)

    async def start(self, running: TaskGroup) -> None:
        """Start all processes concurrently, and return when all are ready."""
        for scorer in self._config.reward.scorers:
            if isinstance(scorer, s.ServedTeacherScorer):
                vocabulary.check_same_vocabulary(self._config.model.path, scorer.tokenizer)
        async with anyio.create_task_group() as starting:
            for process in (*self._processes, *self._models):
                starting.start_soon(process.open)
        for model in self._models:
            running.start_soon(model.run)

    async def close(self) -> None:
        for process in (*self._processes, *self._models):
            process.close()
        for server in self._servers:
            await server.close()

    def _teacher_source(self, teacher: Teacher, scorer: s.Teaching, name: str) -> TeacherSource:
        return TeacherSource(teacher, name=name, top=scorer.top, weight=scorer.weight, where=scorer.where)

    def _process_source(self, scorer: s.ProcessScorer, name: str) -> ProcessSource:
        return ProcessSource(
            scorer.function,
            state_of=self._progress,
            options=scorer.options,
            name=name,
            workers=scorer.workers,
            log=self._log_path(name),
        )

    def _model_process(
        self, role: str, scorer: s.ModelScorer, name: str, options: dict[str, Any], *, top: int = 0
    ) -> ModelProcess:
        process = ModelProcess(
            f"{NETWORKS}:{role}",
            {"path": scorer.path, "dtype": scorer.dtype, **options},
            name=name,
            batch=scorer.batch,
            cells=scorer.batch_tokens,
            deadline_s=scorer.deadline_s,
            threads=scorer.threads,
            top=top,
            log=self._log_path(name),
        )
        self._models.append(process)
        return process

    def _log_path(self, name: str) -> Path | None:
        if self._logs is None:
            return None
        self._logs.mkdir(parents=True, exist_ok=True)
        return self._logs / f"scorer-{name}.log"


def _judge_source(scorer: s.JudgeScorer, name: str) -> JudgeSource:
    return JudgeSource(
        name=name,
        url=scorer.url,
        model=scorer.model,
        template=scorer.template,
        scale=JudgeScale(lowest=scorer.lowest, highest=scorer.highest, field=scorer.field, pattern=scorer.pattern),
        system=scorer.system,
        token=scorer.token or os.environ.get(TOKEN_VARIABLE, ""),
        verify=scorer.verify,
        max_tokens=scorer.max_tokens,
        patience_s=scorer.deadline_s,
    )


def _served_teacher(scorer: s.ServedTeacherScorer, name: str) -> ServedTeacher:
    endpoint = Endpoint(
        scorer.url.rstrip("/") + "/completions",
        name=name,
        token=scorer.token or os.environ.get(TOKEN_VARIABLE, ""),
        verify=scorer.verify,
        deadline_s=scorer.deadline_s,
    )
    return ServedTeacher(endpoint, model=scorer.model, name=name)


def scorer_terms(scorer: s.ScorerConfig) -> ScorerTerms:
    """The terms of a table of reward.scorers. A model's deadline is that of a batch, which ModelProcess keeps."""
    deadline_s = math.inf if isinstance(scorer, s.ModelScorer) else scorer.deadline_s
    match scorer:
        case s.TeacherScorer() | s.ServedTeacherScorer() | s.SelfTeacherScorer():
            return ScorerTerms(deadline_s=deadline_s, at_once=scorer.at_once, failure=scorer.failure, key=DEADLINE_KEY)
        case _:
            return ScorerTerms(
                weight=scorer.weight,
                deadline_s=deadline_s,
                at_once=_concurrent_calls(scorer),
                failure=scorer.failure,
                default=scorer.default,
                key=DEADLINE_KEY,
            )


def _concurrent_calls(scorer: s.ScorerConfig) -> int:
    match scorer:
        case s.ProcessScorer():
            return scorer.workers
        case s.FunctionScorer():
            return scorer.at_once or concurrent_calls(resolve_function(scorer.function))
        case _:
            return scorer.at_once


def scorer_names(config: RunConfig, taken: Sequence[str] = ()) -> list[str]:
    """A name for each of reward.scorers: the one given, else one of its function or model, numbered where that is taken."""
    used, out = set(taken), []
    for scorer in config.reward.scorers:
        name = base = scorer.name or _derived_name(scorer)
        number = 1
        while name in used and not scorer.name:
            number += 1
            name = f"{base}_{number}"
        used.add(name)
        out.append(name)
    return out


def _derived_name(scorer: s.ScorerConfig) -> str:
    match scorer:
        case s.FunctionScorer() | s.ProcessScorer():
            return function_name(resolve_function(scorer.function))
        case s.JudgeScorer():
            return "judge"
        case s.ServedTeacherScorer():
            return "teacher"
        case s.SelfTeacherScorer():
            return "self"
        case _:
            return Path(scorer.path).name
