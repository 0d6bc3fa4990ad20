"""`corrente eval`: which weights, which settings, where the result goes. Behind cli.py, which says what can be asked."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec

from corrente.config import GivenRows, RunConfig, Vllm
from corrente.config.env import SingleTurn
from corrente.config.load import load_config
from corrente.controller import checkpoint_folder
from corrente.controller.eval_metrics import rewards_of
from corrente.controller.evaluator import Evaluation
from corrente.entrypoints import run_folder
from corrente.entrypoints.evaluate import config_of_checkpoint, config_of_model
from corrente.errors import ConfigError

RECORD = "eval.jsonl"


class Subject(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What is evaluated: ``config`` names its weights; ``label`` says what they are; ``record``: where the result goes."""

    config: RunConfig
    label: str
    step: int = 0
    version: int = 0
    record: Path | None = None
    run: Path | None = None
    """The folder of the run it is of."""


def subject(
    target: Path,
    *,
    overrides: Sequence[str] = (),
    checkpoint_name: str | None = None,
    model: Path | None = None,
    out: Path | None = None,
) -> Subject:
    """From the arguments of the command. ``target``: a run folder, or a config file. Raises ConfigError."""
    if not target.exists():
        raise ConfigError(f"{target} does not exist; give the folder of a run, or a config file")
    is_run = target.is_dir()
    if is_run and not (target / run_folder.CONFIG).is_file():
        raise ConfigError(f"{target}: it has no {run_folder.CONFIG}; give the folder of a run, or a config file")
    if checkpoint_name and (model or not is_run):
        raise ConfigError(
            f"--checkpoint {checkpoint_name}: it is one of a run; give the folder of a run, and no --model"
        )
    config = load_config(target / run_folder.CONFIG if is_run else target, overrides)
    if is_run:
        _named(target, config)
    if out is not None and (out.is_dir() or not out.parent.is_dir() or not os.access(out.parent, os.W_OK)):
        raise ConfigError(f"--out {out}: it must be a file in a folder that exists and can be written to")
    record = out or (target / RECORD if is_run else None)
    if model is not None:
        run = target if is_run else None
        return Subject(config=config_of_model(config, model), label=str(model), record=record, run=run)
    if not is_run:
        return Subject(config=config, label=config.model.path, record=record)
    chosen = _checkpoint(target / "checkpoints", checkpoint_name)
    snapshot = checkpoint_folder.read(chosen)
    return Subject(
        config=config_of_checkpoint(config, chosen),
        label=chosen.name,
        step=snapshot.step,
        version=snapshot.version,
        record=record,
        run=target,
    )


@contextmanager
def apart(subject: Subject) -> Iterator[None]:
    """Around an evaluation: on the servers of its run (``engine.urls``) there is one of the two at a time, for each would bring
    weights of its own to them. Raises ConfigError while the run goes on."""
    if subject.run is None or not _urls(subject.config) & _urls(load_config(subject.run / run_folder.CONFIG)):
        yield
        return
    with ExitStack() as stack:
        try:
            stack.enter_context(run_folder.held(subject.run))
        except ConfigError:
            raise ConfigError(
                f"engine.urls: the run in {subject.run} still goes on, and samples from these servers; wait for its end, or "
                "evaluate on another engine, such as --set engine.kind=embedded"
            ) from None
        yield


def _urls(config: RunConfig) -> frozenset[str]:
    return frozenset(url.rstrip("/") for url in config.engine.urls) if isinstance(config.engine, Vllm) else frozenset()


def _named(run: Path, config: RunConfig) -> None:
    """Raise ConfigError where a run's prompts or rewards were Python objects, which its config cannot bring back."""
    lost = []
    if isinstance(config.prompts, GivenRows):
        lost.append("prompts: --set prompts.kind=jsonl --set prompts.path=FILE --set prompts.eval_path=FILE")
    if isinstance(config.env, SingleTurn) and not config.reward.functions and not config.reward.scorers:
        lost.append("""rewards: --set 'reward.functions=["FILE.py:function"]'""")
    if lost:
        raise ConfigError(
            f"{run} was made with Python objects, which its config cannot bring back; name the {'; the '.join(lost)}"
        )


def keep(subject: Subject, evaluation: Evaluation) -> None:
    """Append the result to ``subject.record``, as one line: labels, settings, numbers, and the rewards of every prompt."""
    if subject.record is None:
        return
    config = subject.config
    line: dict[str, Any] = {
        "of": subject.label,
        "step": evaluation.step,
        "version": evaluation.version,
        "seed": config.run.seed,
        "eval": msgspec.to_builtins(config.eval),
        "metrics": evaluation.metrics,
        "prompts": {group.prompt.id: rewards_of(group) for group in evaluation.groups},
    }
    with subject.record.open("ab") as file:
        file.write(msgspec.json.encode(line) + b"\n")


def _checkpoint(folder: Path, name: str | None) -> Path:
    found = checkpoint_folder.complete(folder)
    if not found:
        raise ConfigError(f"{folder} holds no complete checkpoint; evaluate its model with --model, or a config file")
    if name is None:
        return found[-1]
    chosen = next((path for path in found if path.name == name), None)
    if chosen is None:
        raise ConfigError(f"--checkpoint {name}: it must be one of {', '.join(path.name for path in found)}")
    return chosen
