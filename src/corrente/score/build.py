"""From a config's ``reward`` section to a panel whose processes run and whose models are loaded, for as long as it is open."""

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
from corrente.score.functions import FunctionSource, Offload, Progress, calls_at_once, members
from corrente.score.judge import JudgeSource, Scale
from corrente.score.models import ModelProcess, ProcessRewardSource, RewardModelSource
from corrente.score.processes import ProcessSource
from corrente.score.resolve import accepted, name_of, resolve
from corrente.score.served import ServedTeacher
from corrente.score.teacher import Borrowed, Teacher, TeacherSource

KEY = "deadline_s of its [[reward.scorers]]"
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
    """The scorer a config asks for.

    ``functions`` replace reward.functions. ``logs``: a folder for what processes write to their standard output and error.
    ``own``: the policy of some versions ago, for a scorer of kind self_teacher. On exit all processes are gone. ConfigError for
    what cannot be imported or loaded.
    """
    reward = config.reward
    updates = config.algo.num_iterations
    progress = Progress(every=config.sync.every * updates, max_steps=config.run.steps * updates)
    listed = members(
        functions or [resolve(name) for name in reward.functions],
        weights=reward.weights,
        deadline_s=reward.deadline_s,
        offload=offload,
        state_of=progress,
    )
    opening = _Opening(config, progress=progress, offload=offload, logs=logs, own=own or Borrowed())
    named = list(zip(names(config, [source.name for source, _ in listed]), reward.scorers, strict=True))
    try:
        async with anyio.create_task_group() as running:
            more = [(opening.source(scorer, name), terms(scorer)) for name, scorer in named]
            panel = CombinedScorer([*listed, *more])
            await opening.start(running)
            yield panel
            running.cancel_scope.cancel()
    finally:
        with anyio.CancelScope(shield=True):
            await opening.close()


def sees_environments(config: RunConfig, functions: Sequence[Callable[..., Any]] = ()) -> bool:
    """Whether a function takes ``environments``, or whatever there is. ``functions`` replace reward.functions."""
    listed = [*(functions or map(resolve, config.reward.functions))]
    listed += [resolve(scorer.function) for scorer in config.reward.scorers if isinstance(scorer, s.FunctionScorer)]
    return any((takes := accepted(function)) is None or "environments" in takes for function in listed)


class _Opening:
    """Sources as they are made, and what must be started and stopped for them."""

    def __init__(
        self, config: RunConfig, *, progress: Progress, offload: Offload | None, logs: Path | None, own: Teacher
    ) -> None:
        self._config, self._progress, self._offload, self._logs, self._own = config, progress, offload, logs, own
        self._processes: list[ProcessSource] = []
        self._models: list[ModelProcess] = []
        self._servers: list[JudgeSource | ServedTeacher] = []

    def source(self, scorer: s.ScorerConfig, name: str) -> Source:
        """What a table of reward.scorers asks for; not started yet."""
        match scorer:
            case s.FunctionScorer():
                function = functools.partial(resolve(scorer.function), **scorer.options)
                return FunctionSource(
                    function, name=name, offload=self._offload, state_of=self._progress, at_once=scorer.at_once
                )
            case s.ProcessScorer():
                self._processes.append(self._process(scorer, name))
                return self._processes[-1]
            case s.JudgeScorer():
                judge = _judge(scorer, name)
                self._servers.append(judge)
                return judge
            case s.RewardModelScorer():
                options = {"chat": scorer.chat, "label": scorer.label}
                return RewardModelSource(self._model("reward_model", scorer, name, options))
            case s.ProcessRewardScorer():
                options = {
                    "tokenizer": self._config.model.path,
                    "delimiter": scorer.delimiter,
                    "separator": scorer.separator,
                    "label": scorer.label,
                }
                return ProcessRewardSource(
                    self._model("process_model", scorer, name, options), aggregate=scorer.aggregate
                )
            case s.TeacherScorer():
                temperature = s.temperature_of(scorer, sampling=self._config.sampling.temperature)
                options = {"tokenizer": self._config.model.path, "temperature": temperature}
                return self._teacher(self._model("teacher", scorer, name, options, top=scorer.top), scorer, name)
            case s.ServedTeacherScorer():
                served = _served(scorer, name)
                self._servers.append(served)
                return self._teacher(served, scorer, name)
            case s.SelfTeacherScorer():
                return self._teacher(self._own, scorer, name)

    async def start(self, running: TaskGroup) -> None:
        """Start everything at once, and return when all of it is ready."""
        for scorer in self._config.reward.scorers:
            if isinstance(scorer, s.ServedTeacherScorer):
                vocabulary.check(self._config.model.path, scorer.tokenizer)
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

    def _teacher(self, teacher: Teacher, scorer: s.Teaching, name: str) -> TeacherSource:
        return TeacherSource(teacher, name=name, top=scorer.top, weight=scorer.weight, where=scorer.where)

    def _process(self, scorer: s.ProcessScorer, name: str) -> ProcessSource:
        return ProcessSource(
            scorer.function,
            state_of=self._progress,
            options=scorer.options,
            name=name,
            workers=scorer.workers,
            log=self._log(name),
        )

    def _model(
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
            log=self._log(name),
        )
        self._models.append(process)
        return process

    def _log(self, name: str) -> Path | None:
        if self._logs is None:
            return None
        self._logs.mkdir(parents=True, exist_ok=True)
        return self._logs / f"scorer-{name}.log"


def _judge(scorer: s.JudgeScorer, name: str) -> JudgeSource:
    return JudgeSource(
        name=name,
        url=scorer.url,
        model=scorer.model,
        template=scorer.template,
        scale=Scale(lowest=scorer.lowest, highest=scorer.highest, field=scorer.field, pattern=scorer.pattern),
        system=scorer.system,
        token=scorer.token or os.environ.get(TOKEN_VARIABLE, ""),
        verify=scorer.verify,
        max_tokens=scorer.max_tokens,
        patience_s=scorer.deadline_s,
    )


def _served(scorer: s.ServedTeacherScorer, name: str) -> ServedTeacher:
    endpoint = Endpoint(
        scorer.url.rstrip("/") + "/completions",
        name=name,
        token=scorer.token or os.environ.get(TOKEN_VARIABLE, ""),
        verify=scorer.verify,
        deadline_s=scorer.deadline_s,
    )
    return ServedTeacher(endpoint, model=scorer.model, name=name)


def terms(scorer: s.ScorerConfig) -> ScorerTerms:
    """The terms of a table of reward.scorers. Of a model the deadline is that of a batch, and ModelProcess keeps it."""
    deadline_s = math.inf if isinstance(scorer, s.ModelScorer) else scorer.deadline_s
    match scorer:
        case s.TeacherScorer() | s.ServedTeacherScorer() | s.SelfTeacherScorer():
            return ScorerTerms(deadline_s=deadline_s, at_once=scorer.at_once, failure=scorer.failure, key=KEY)
        case _:
            return ScorerTerms(
                weight=scorer.weight,
                deadline_s=deadline_s,
                at_once=_at_once(scorer),
                failure=scorer.failure,
                default=scorer.default,
                key=KEY,
            )


def _at_once(scorer: s.ScorerConfig) -> int:
    match scorer:
        case s.ProcessScorer():
            return scorer.workers
        case s.FunctionScorer():
            return scorer.at_once or calls_at_once(resolve(scorer.function))
        case _:
            return scorer.at_once


def names(config: RunConfig, taken: Sequence[str] = ()) -> list[str]:
    """A name for each of reward.scorers: the one given, else what it is made of, numbered from the second on if that is taken."""
    used, out = set(taken), []
    for scorer in config.reward.scorers:
        name = base = scorer.name or _derived(scorer)
        number = 1
        while name in used and not scorer.name:
            number += 1
            name = f"{base}_{number}"
        used.add(name)
        out.append(name)
    return out


def _derived(scorer: s.ScorerConfig) -> str:
    match scorer:
        case s.FunctionScorer() | s.ProcessScorer():
            return name_of(resolve(scorer.function))
        case s.JudgeScorer():
            return "judge"
        case s.ServedTeacherScorer():
            return "teacher"
        case s.SelfTeacherScorer():
            return "self"
        case _:
            return Path(scorer.path).name
