"""The target of an evaluation: the weights of a run's checkpoint, of a model directory, or those a config names."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec

from corrente import config as c
from corrente.config import GivenRows, RunConfig, Vllm
from corrente.config.env import SingleTurn
from corrente.config.load import load_config
from corrente.controller import checkpoint_folder
from corrente.controller.eval_metrics import rewards_of
from corrente.controller.evaluator import Evaluation
from corrente.data.checkpoint_names import CHECKPOINTS, LEARNER
from corrente.entrypoints import run_folder
from corrente.entrypoints.inputs import NO_INPUTS, RunInputs
from corrente.errors import ConfigError

RECORD = "eval.jsonl"
"""File of a run's folder to which evaluations of it are added."""
PEFT = "adapter_config.json"
"""File that makes a directory one of a peft adapter."""


class EvalTarget(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The weights to evaluate and where the result goes. ``config`` names the weights; ``label`` describes them."""

    config: RunConfig
    label: str
    step: int = 0
    version: int = 0
    record: Path | None = None
    """The file that the result is added to; None: it is only returned."""
    run: Path | None = None
    """The folder of the run that the weights, or the settings, are of."""


def find_target(
    source: RunConfig | str | Path,
    *,
    overrides: Sequence[str] = (),
    checkpoint: str | None = None,
    model: str | Path | None = None,
    out: str | Path | None = None,
    inputs: RunInputs = NO_INPUTS,
) -> EvalTarget:
    """The target that the arguments of ``evaluate`` describe. Raises ConfigError, and CheckpointError for a damaged one."""
    if isinstance(source, RunConfig):
        if overrides:
            raise ConfigError(f"overrides = {list(overrides)}: they are applied to a file; change the config itself")
        run, config = None, source
    else:
        run, config = _load(Path(source), overrides)
    if checkpoint and (model or run is None):
        raise ConfigError(f"checkpoint {checkpoint}: it is one of a run; give the folder of a run, and no model")
    if run is not None:
        _check_objects(run, config, inputs)
    record = _record(Path(out)) if out is not None else run / RECORD if run is not None else None
    if model is not None:
        return EvalTarget(config=config_of_model(config, Path(model)), label=str(model), record=record, run=run)
    if run is None:
        return EvalTarget(config=config, label=config.model.path, record=record)
    chosen = _checkpoint(run / CHECKPOINTS, checkpoint)
    snapshot = checkpoint_folder.read(chosen)
    return EvalTarget(
        config=config_of_checkpoint(config, chosen),
        label=chosen.name,
        step=snapshot.step,
        version=snapshot.version,
        record=record,
        run=run,
    )


def config_of_checkpoint(config: RunConfig, folder: Path) -> RunConfig:
    """``config`` with the weights of ``folder``, a complete checkpoint of a run with these settings."""
    learner = str(folder / LEARNER)
    if isinstance(config.adapters, c.Full):
        return msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, path=learner))
    return msgspec.structs.replace(config, adapters=msgspec.structs.replace(config.adapters, init=learner))


def config_of_model(config: RunConfig, folder: Path) -> RunConfig:
    """``config`` with the weights of ``folder``: a whole model, or an adapter to ``config.model``. Raises ConfigError."""
    if not folder.is_dir():
        raise ConfigError(f"model {folder}: it must be a directory with a model or with a peft adapter")
    if not (folder / PEFT).is_file():
        model = msgspec.structs.replace(config.model, path=str(folder))
        return msgspec.structs.replace(config, model=model, adapters=c.Full())
    try:
        peft = json.loads((folder / PEFT).read_text(encoding="utf-8"))
        targets, parameters = peft["target_modules"], peft.get("target_parameters") or ()
        adapters = c.Lora(
            rank=int(peft["r"]),
            alpha=float(peft["lora_alpha"]),
            targets=(targets,) if isinstance(targets, str) else tuple(targets or ()),
            target_parameters=tuple(parameters),
            init=str(folder),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"model {folder}: {PEFT} cannot be read: {error!r}") from error
    if isinstance(config.adapters, c.LoraMerged):
        merged = {name: getattr(adapters, name) for name in adapters.__struct_fields__}
        return msgspec.structs.replace(config, adapters=c.LoraMerged(**merged))
    return msgspec.structs.replace(config, adapters=adapters)


@contextmanager
def hold_servers(target: EvalTarget) -> Iterator[None]:
    """Keep the servers of a run (``engine.urls``) to one user at a time: the run, or an evaluation of it. Either would bring
    weights of its own to them. Raises ConfigError while the run goes on."""
    if target.run is None or not _urls(target.config) & _urls(load_config(target.run / run_folder.CONFIG)):
        yield
        return
    with ExitStack() as stack:
        try:
            stack.enter_context(run_folder.held(target.run))
        except ConfigError:
            raise ConfigError(
                f"engine.urls: the run in {target.run} still goes on, and samples from these servers; wait for its end, or "
                "evaluate on another engine, such as --set engine.kind=embedded"
            ) from None
        yield


def add_to_record(target: EvalTarget, evaluation: Evaluation) -> None:
    """Append the result to ``target.record``, as one line: labels, settings, numbers, and the rewards of every prompt."""
    if target.record is None:
        return
    config = target.config
    line: dict[str, Any] = {
        "of": target.label,
        "step": evaluation.step,
        "version": evaluation.version,
        "seed": config.run.seed,
        "eval": msgspec.to_builtins(config.eval),
        "metrics": evaluation.metrics,
        "prompts": {group.prompt.id: rewards_of(group) for group in evaluation.groups},
    }
    with target.record.open("ab") as file:
        file.write(msgspec.json.encode(line) + b"\n")


def _load(source: Path, overrides: Sequence[str]) -> tuple[Path | None, RunConfig]:
    """The folder of a run, None for a config file, and the config."""
    if not source.exists():
        raise ConfigError(f"{source} does not exist; give the folder of a run, or a config file")
    if not source.is_dir():
        return None, load_config(source, overrides)
    if not (source / run_folder.CONFIG).is_file():
        raise ConfigError(f"{source}: it has no {run_folder.CONFIG}; give the folder of a run, or a config file")
    return source, load_config(source / run_folder.CONFIG, overrides)


def _check_objects(run: Path, config: RunConfig, inputs: RunInputs) -> None:
    """Raise ConfigError where a run's prompts or rewards were Python objects, and neither names nor objects are given now."""
    lost = []
    if isinstance(config.prompts, GivenRows) and inputs.eval_dataset is None:
        lost.append("prompts: --set prompts.kind=jsonl --set prompts.path=FILE --set prompts.eval_path=FILE")
    named = config.reward.functions or config.reward.scorers or inputs.reward_functions
    if isinstance(config.env, SingleTurn) and inputs.env is None and not named:
        lost.append("""rewards: --set 'reward.functions=["FILE.py:function"]'""")
    if lost:
        raise ConfigError(
            f"{run} was made with Python objects, which its config cannot bring back; name the {'; the '.join(lost)}"
        )


def _record(out: Path) -> Path:
    if out.is_dir() or not out.parent.is_dir() or not os.access(out.parent, os.W_OK):
        raise ConfigError(f"out = {out}: it must be a file in a folder that exists and can be written to")
    return out


def _urls(config: RunConfig) -> frozenset[str]:
    return frozenset(url.rstrip("/") for url in config.engine.urls) if isinstance(config.engine, Vllm) else frozenset()


def _checkpoint(folder: Path, name: str | None) -> Path:
    found = checkpoint_folder.complete(folder)
    if not found:
        raise ConfigError(f"{folder} holds no complete checkpoint; evaluate a model directory, or a config file")
    if name is None:
        return found[-1]
    chosen = next((path for path in found if path.name == name), None)
    if chosen is None:
        raise ConfigError(f"checkpoint {name}: it must be one of {', '.join(path.name for path in found)}")
    return chosen
