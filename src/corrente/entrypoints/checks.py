"""Combinations of settings that cannot work, refused before a model is loaded and before anything is written.

Each function judges one subject and raises ConfigError with the value, what is allowed and the key. What is read is the prompt
file and the user's reward module. Ranges of single keys are the loader's business.
"""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from corrente.adapters import checks as adapters_checks
from corrente.algo import checks as algo_checks
from corrente.algo import distill_checks
from corrente.config import (
    Arithmetic,
    Dataset,
    Embedded,
    GivenRows,
    Inline,
    Jsonl,
    Mixture,
    Parquet,
    ReasoningGym,
    RunConfig,
    Seeds,
    Stream,
    Window,
    schema,
)
from corrente.config.env import Environments
from corrente.config.learner import INSTALL, OPTIMIZER_PACKAGES
from corrente.config.prompts import ArithmeticSource, JsonlSource, ParquetSource
from corrente.config.rewards import Teaching
from corrente.data.types import Prompt
from corrente.engine.vllm import checks as vllm_checks
from corrente.entrypoints.inputs import NO_INPUTS, RunInputs
from corrente.env import checks as env_checks
from corrente.errors import ConfigError
from corrente.learner.schedule import check_schedule
from corrente.models import cache as model_cache
from corrente.models import devices, pretrained
from corrente.models.limits import context_tokens, position_limit, vocabulary_size
from corrente.observe import trackers
from corrente.prompts import arithmetic, dataset, jsonl, reasoning_gym, rows
from corrente.prompts import chat as chat_template
from corrente.prompts.base import ENVIRONMENT_COLUMN
from corrente.prompts.build import source_name
from corrente.prompts.mixture import COLUMN
from corrente.score import checks as score_checks
from corrente.staleness import gate
from corrente.sync import checks as sync_checks

MOST_THREADS = 1024
"""Beyond any machine's cores, and below what crashes a thread pool."""

__all__ = ["check_config", "check_loaded_prompts"]


def cautions(config: RunConfig) -> list[str]:
    """Warnings for the start of a run, about settings that work and are rarely meant."""
    return [*adapters_checks.cautions(config), *algo_checks.cautions(config)]


def check_config(config: RunConfig, inputs: RunInputs = NO_INPUTS) -> None:
    """Raise ConfigError for the first thing that cannot work; cheap checks first. ``inputs`` replace what the config names."""
    for judge in (
        _run,
        _runtime,
        _sampling,
        _learner,
        _pool,
        sync_checks.check,
        vllm_checks.check,
        _flow,
        algo_checks.check,
        distill_checks.check,
        _run_folder,
        _model,
        _context,
        _stop_ids,
        _experts,
        _adapters,
        _filter,
        trackers.check,
        _eval,
    ):
        judge(config)
    env_checks.check_env_settings(config, **inputs.env_objects())
    _prompts(config, inputs)


def _run(config: RunConfig) -> None:
    name = config.run.name
    if not name or name in (".", "..") or any(c in name for c in "/\\\0") or name != name.strip():
        raise ConfigError(f"run.name = {name!r}: it names a folder, so it must be a plain file name")
    every = config.sync.every
    if config.run.steps % every:
        raise ConfigError(f"run.steps = {config.run.steps}: it must be a multiple of sync.every = {every}")
    if config.checkpoint.every % every:
        raise ConfigError(
            f"checkpoint.every = {config.checkpoint.every}: it must be a multiple of sync.every = {every}, or 0"
        )


def _runtime(config: RunConfig) -> None:
    threads = config.runtime.threads if isinstance(config.runtime, Inline) else 0
    if threads > MOST_THREADS:
        raise ConfigError(f"runtime.threads = {threads}: it must be at most {MOST_THREADS} (0: as many as cores)")


def _sampling(config: RunConfig) -> None:
    s = config.sampling
    ranges = (
        ("max_tokens", s.max_tokens, s.max_tokens >= 1, "at least 1"),
        (
            "temperature",
            s.temperature,
            0 < s.temperature < math.inf,
            "above 0: greedy completions of a prompt are all alike",
        ),
        ("top_k", s.top_k, s.top_k >= 0, "at least 0 (0: off)"),
        ("top_p", s.top_p, 0 < s.top_p <= 1, "above 0 and at most 1 (1: off)"),
        ("min_p", s.min_p, 0 <= s.min_p < 1, "at least 0 (0: off) and below 1"),
        ("stop", s.stop, all(s.stop), "a list of texts, none of them empty"),
        (
            "stop_token_ids",
            s.stop_token_ids,
            all(i >= 0 for i in s.stop_token_ids),
            "a list of token ids, none negative",
        ),
    )
    for key, value, fine, allowed in ranges:
        if not fine:
            raise ConfigError(f"sampling.{key} = {schema.show(value)}: it must be {allowed}")


def _learner(config: RunConfig) -> None:
    if not all(0 <= beta < 1 for beta in config.learner.betas):
        betas = schema.show(config.learner.betas)
        raise ConfigError(f"learner.betas = {betas}: both must be at least 0 and below 1")
    name = config.learner.optimizer
    package = OPTIMIZER_PACKAGES.get(name)
    if package is not None and importlib.util.find_spec(package) is None:
        raise ConfigError(f'learner.optimizer = "{name}": it needs {package}: {INSTALL[package]}')
    check_schedule(config.learner, steps=config.run.steps)


def _pool(config: RunConfig) -> None:
    if config.pool.join and not isinstance(config.engine, Embedded):
        raise ConfigError(
            f'pool.join = true: engines that join are embedded ones, and engine.kind = "{schema.kind_of(config.engine)}"; '
            'it must be false, or engine.kind "embedded"'
        )
    if not isinstance(config.runtime, Inline):
        return
    for key, value, allowed in (("replicas", config.pool.replicas, 1), ("join", config.pool.join, False)):
        if value != allowed:
            raise ConfigError(
                f'pool.{key} = {schema.show(value)}: runtime.kind = "inline" has one engine, in its own process; it must be '
                f'{schema.show(allowed)} there (runtime.kind = "procs" has replicas)'
            )


def _flow(config: RunConfig) -> None:
    slots = gate.slots(config)
    if isinstance(config.buffer, Window) and config.buffer.window > slots:
        raise ConfigError(
            f"buffer.window = {config.buffer.window}: it must be at most {slots}, the buffer's slots: "
            f"(staleness.max + 1) x run.prompts_per_step x sync.every"
        )
    bounded = config.staleness.reject is not None or config.staleness.mask is not None
    if isinstance(config.buffer, Stream) and not bounded:
        raise ConfigError('buffer.kind = "stream" has no bound of its own: set staleness.reject or staleness.mask')


def _context(config: RunConfig) -> None:
    """The context must be one the model has (a vLLM server judges for itself) and hold sampling.max_tokens; a model that is not
    here yet is judged by the longest context that engines take."""
    path = Path(config.model.path)
    where = path if path.is_dir() else model_cache.cached_model(config.model.path) or path
    wanted, embedded = config.engine.max_context, isinstance(config.engine, Embedded)
    most = position_limit(where, windowed=True)
    if embedded and most is not None and wanted > most:
        raise ConfigError(
            f"engine.max_context = {wanted}: {config.model.path} has {most} positions; it must be at most that, or 0"
        )
    room = context_tokens(where, wanted, windowed=embedded)
    if room > config.sampling.max_tokens:
        return
    if wanted:
        raise ConfigError(
            f"engine.max_context = {room}: it must be above sampling.max_tokens = {config.sampling.max_tokens}, to leave room "
            "for a prompt"
        )
    raise ConfigError(
        f"sampling.max_tokens = {config.sampling.max_tokens}: the engine takes {room} tokens of {config.model.path}, prompt and "
        "completion together; it must be below that, or engine.max_context above it where the model allows that"
    )


def _run_folder(config: RunConfig) -> None:
    folder = Path(config.run.dir)
    nearest = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not nearest.is_dir():
        raise ConfigError(f"run.dir = {config.run.dir!r}: {nearest} is a file; it must be a directory")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ConfigError(f"run.dir = {config.run.dir!r}: {nearest} cannot be written to; name a directory that can")


def _model(config: RunConfig) -> None:
    model_cache.verify_model_path(config.model.path)
    for kind in ("AutoModelForCausalLM", "AutoTokenizer"):
        trust = config.model.trust_remote_code
        pretrained.verify_code(config.model.path, kind=kind, trust_remote_code=trust, key="model.path")
    if config.model.device == "cuda":
        devices.require_gpus('model.device = "cuda"')


def _stop_ids(config: RunConfig) -> None:
    path = Path(config.model.path)
    known = vocabulary_size(path if path.is_dir() else model_cache.cached_model(config.model.path) or path)
    beyond = [token for token in config.sampling.stop_token_ids if known is not None and token >= known]
    if beyond:
        raise ConfigError(
            f"sampling.stop_token_ids = {schema.show(config.sampling.stop_token_ids)}: {config.model.path} has {known} tokens, "
            f"so {beyond[0]} is never sampled; each must be below that"
        )


def _experts(config: RunConfig) -> None:
    """Settings for mixtures of experts need one; a model that is not here yet is judged when it is loaded."""
    asked = {
        "model.keep_routing = true": config.model.keep_routing,
        f"learner.router_aux_loss_coef = {config.learner.router_aux_loss_coef:g}": config.learner.router_aux_loss_coef,
    }
    path = Path(config.model.path)
    where = path if path.is_dir() else model_cache.cached_model(config.model.path)
    if where is None or not any(asked.values()) or model_cache.count_experts(where):
        return
    key = next(key for key, value in asked.items() if value)
    raise ConfigError(f"{key}: {config.model.path} is no mixture of experts; leave it out")


def _adapters(config: RunConfig) -> None:
    path = Path(config.model.path)
    adapters_checks.check(config, model=path if path.is_dir() else model_cache.cached_model(config.model.path))


def _filter(config: RunConfig) -> None:
    low, high = config.filter.pass_rate_min, config.filter.pass_rate_max
    if low > high:
        raise ConfigError(f"filter.pass_rate_min = {low:g}: it must be at most filter.pass_rate_max = {high:g}")


def _eval(config: RunConfig) -> None:
    for k in config.eval.pass_at:
        if k > config.eval.samples:
            raise ConfigError(
                f"eval.pass_at = {schema.show(config.eval.pass_at)}: pass@{k} needs at least {k} samples of a prompt; set "
                f"eval.samples, which is {config.eval.samples}, or leave {k} out"
            )


def _prompts(config: RunConfig, inputs: RunInputs) -> None:
    """Prompts and rewards together: each function, and each judge, must find the columns it asks for."""
    if config.chat.template:
        chat_template.read_template(config.chat.template)
    played_in = isinstance(config.env, Environments)  # it may give rewards of its own
    rewarded = played_in or inputs.env is not None or inputs.environment_factory is not None
    score_checks.check_reward_settings(config, inputs.reward_functions, rewarded=rewarded)
    needs = score_checks.needed_columns(config, inputs.reward_functions)
    _named("eval.sources", config.eval.sources, needs)
    if inputs.train_dataset is not None:
        for dataset_rows in (inputs.train_dataset, inputs.eval_dataset):
            _check_passed_rows(dataset_rows, needs, inputs, config)
        return
    if not isinstance(config.prompts, Mixture):
        _source(config.prompts, needs, where="prompts")
        return
    sources = config.prompts.sources
    if not sources or not any(source.weight for source in sources):
        raise ConfigError("prompts.sources: give at least one, and at least one with a weight above 0")
    names = _named("prompts.sources", sources, needs)
    for at, scorer in enumerate(config.reward.scorers):
        asked = scorer.where.get(COLUMN, []) if isinstance(scorer, Teaching) else []
        for name in asked if isinstance(asked, list) else [asked]:
            if name not in names:
                raise ConfigError(
                    f"reward.scorers[{at}].where: {COLUMN} = {name!r}; the sources are called {', '.join(names)}"
                )


def check_loaded_prompts(config: RunConfig, prompt: Prompt, functions: Sequence[Callable[..., object]] = ()) -> None:
    """Raise ConfigError if a function or judge asks for a column that ``prompt``, the first of a dataset, does not have: only the
    data tells. ``functions`` replace reward.functions."""
    _columns(score_checks.needed_columns(config, functions), frozenset(prompt.fields), "the dataset")


def _named(
    key: str, sources: Sequence[ArithmeticSource | JsonlSource | ParquetSource], needs: score_checks.Needs
) -> list[str]:
    """The names of several sources, each of which must be another."""
    names = [source_name(source) for source in sources]
    for at, (name, source) in enumerate(zip(names, sources, strict=True)):
        if name in names[:at] or name in ("", "reward") or any(c in name for c in ":/"):
            raise ConfigError(
                f"{key}[{at}].name = {name!r}: every source needs another name, without colon and slash, and not 'reward'"
            )
        _source(source, needs, where=f"{key}[{at}]", added=frozenset({COLUMN}))
    return names


def _source(
    source: Arithmetic | Jsonl | Parquet | Dataset | GivenRows | Seeds | ReasoningGym,
    needs: score_checks.Needs,
    *,
    where: str,
    added: frozenset[str] = frozenset(),
) -> None:
    match source:
        case Arithmetic():
            arithmetic.verify_arithmetic(source)
            _columns(needs, added | {"answer"}, f'{where}.kind = "arithmetic"')
        case Jsonl(path=path, eval_path=eval_path, column=column):
            _columns(needs, added | jsonl.verify_jsonl(Path(path), key=f"{where}.path", column=column), path)
            if eval_path:
                eval_columns = jsonl.verify_jsonl(Path(eval_path), key=f"{where}.eval_path", column=column)
                _columns(needs, added | eval_columns, eval_path)
        case Parquet(path=path, eval_path=eval_path, column=column):
            for key, file in ((f"{where}.path", path), *([(f"{where}.eval_path", eval_path)] if eval_path else [])):
                found = dataset.parquet_columns(file, key=key)
                if column not in found:
                    has = ", ".join(sorted(map(repr, found)))
                    raise ConfigError(f"{where}.column = {column!r}: {file} has no such column (it has {has})")
                _columns(needs, added | (found - {column}), file)
        case Dataset() | GivenRows():
            pass  # what columns they have is known once they are loaded, before any model is
        case Seeds():
            _columns(needs, added | {"seed"}, f'{where}.kind = "seeds"')
        case ReasoningGym():
            reasoning_gym.verify_reasoning_gym(source)
            _columns(needs, added | reasoning_gym.COLUMNS, f'{where}.kind = "reasoning_gym"')


def _check_passed_rows(dataset_rows: Any, needs: score_checks.Needs, inputs: RunInputs, config: RunConfig) -> None:
    """Check the columns of a dataset that a program passed, as far as it names them."""
    if isinstance(dataset_rows, Mapping):
        for part in dataset_rows.values():
            _check_passed_rows(part, needs, inputs, config)
        return
    if dataset_rows is None:
        return
    name, column = "the dataset that was given", getattr(config.prompts, "column", "prompt")
    opens, environments = inputs.environment_opens(config), inputs.environment_names
    if isinstance(dataset_rows, list):
        for number, row in enumerate(dataset_rows):
            if not (opens and isinstance(row, Mapping) and row.get(column) is None):
                rows.prompt_of_row(row, number, column=column, name=name)
        common = (
            frozenset.intersection(*(frozenset(map(str, row)) for row in dataset_rows)) if dataset_rows else frozenset()
        )
        _columns(needs, common, name)
    elif columns := _column_names(dataset_rows):
        if column not in columns and not opens:
            has = ", ".join(map(repr, columns))
            raise ConfigError(f"prompts.column = {column!r}: {name} has no such column (it has {has})")
        _columns(needs, frozenset(map(str, columns)), name)
    if environments is not None and not isinstance(
        table := dataset.wrap_dataset(dataset_rows, name=name), dataset.RowStream
    ):
        for row, value in enumerate(rows.column_values(table, ENVIRONMENT_COLUMN)):
            rows.check_environment(value, row, name=name, environments=environments)


def _column_names(dataset_rows: Any) -> list[str]:
    """The names of a dataset's columns; none where it does not say."""
    if hasattr(dataset_rows, "iloc") and hasattr(dataset_rows, "columns"):
        return list(map(str, dataset_rows.columns))
    return list(getattr(dataset_rows, "column_names", None) or ())


def _columns(needs: score_checks.Needs, columns: frozenset[str], source: str) -> None:
    for reserved in score_checks.OFFERED_ARGUMENTS:
        if reserved in columns:
            raise ConfigError(
                f"{source}: rename the column {reserved!r}; reward functions are given another of that name"
            )
    for asking, needed in needs:
        missing = [name for name in needed if name not in columns]
        if missing:
            has = ", ".join(sorted(columns)) or "none"
            raise ConfigError(
                f"{asking} needs {missing[0]!r}, which {source} does not have in every row (columns: {has})"
            )
