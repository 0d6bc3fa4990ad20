"""Combinations of settings that cannot work, refused before a model is loaded and before anything is written.

Each function judges one subject and raises ConfigError with the value, what is allowed and the key. What is read is the prompt
file and the user's reward module. Ranges of single keys are the loader's business.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

from corrente import models, schema
from corrente.algo import checks as algo_checks
from corrente.config import Arithmetic, Jsonl, RunConfig, Stream, Window
from corrente.errors import ConfigError
from corrente.prompts import arithmetic, jsonl
from corrente.score.functions import FunctionScorer
from corrente.score.resolve import GIVEN, Function, name_of, needed, resolve
from corrente.staleness import gate

__all__ = ["check"]

SYNC_OF_RUNTIME = {"inline": "inproc", "procs": "shm"}
"""The weight transport each runtime needs."""


def check(config: RunConfig) -> None:
    """Raise ConfigError for the first thing that cannot work; cheap checks first."""
    for judge in (_run, _sampling, _learner, _runtime, _flow, algo_checks.check, _run_folder, _model, _prompts):
        judge(config)


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
    room = config.engine.max_context
    if room and room <= s.max_tokens:
        raise ConfigError(
            f"engine.max_context = {room}: it must be above sampling.max_tokens = {s.max_tokens}, to leave room for a prompt"
        )


def _learner(config: RunConfig) -> None:
    if not all(0 <= beta < 1 for beta in config.learner.betas):
        betas = schema.show(config.learner.betas)
        raise ConfigError(f"learner.betas = {betas}: both must be at least 0 and below 1")


def _runtime(config: RunConfig) -> None:
    wanted = SYNC_OF_RUNTIME[schema.kind_of(config.runtime)]
    sync = schema.kind_of(config.sync)
    if sync != wanted:
        runtime = schema.kind_of(config.runtime)
        raise ConfigError(f'sync.kind = "{sync}": runtime.kind = "{runtime}" needs sync.kind = "{wanted}"')


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


def _run_folder(config: RunConfig) -> None:
    folder = Path(config.run.dir)
    nearest = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not nearest.is_dir():
        raise ConfigError(f"run.dir = {config.run.dir!r}: {nearest} is a file; it must be a directory")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ConfigError(f"run.dir = {config.run.dir!r}: {nearest} cannot be written to; name a directory that can")


def _model(config: RunConfig) -> None:
    models.verify_path(config.model.path)


def _prompts(config: RunConfig) -> None:
    """Prompts and reward functions together: each function must find the columns it asks for."""
    functions = [resolve(name) for name in config.reward.functions]
    if not functions:
        raise ConfigError("reward.functions = []: give at least one")
    FunctionScorer(functions, weights=config.reward.weights)
    match config.prompts:
        case Arithmetic() as settings:
            arithmetic.verify(settings)
            _columns(functions, frozenset({"answer"}), 'prompts.kind = "arithmetic"')
        case Jsonl(path=path, eval_path=eval_path, column=column):
            _columns(functions, jsonl.verify(Path(path), key="prompts.path", column=column), path)
            if eval_path:
                _columns(functions, jsonl.verify(Path(eval_path), key="prompts.eval_path", column=column), eval_path)


def _columns(functions: list[Function], columns: frozenset[str], source: str) -> None:
    for reserved in GIVEN:
        if reserved in columns:
            raise ConfigError(
                f"{source}: rename the column {reserved!r}; reward functions are given another of that name"
            )
    for function in functions:
        missing = [name for name in needed(function) if name not in GIVEN and name not in columns]
        if missing:
            has = ", ".join(sorted(columns)) or "none"
            raise ConfigError(
                f"reward.functions: {name_of(function)} needs {missing[0]!r}, which {source} does not have in every row "
                f"(columns: {has})"
            )
