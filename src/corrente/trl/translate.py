"""Translates TRL's arguments to the tables of a RunConfig: pure, of what is known before a model is loaded.

    config = translate(args, facts)          checked by the caller, with what the caller brings (RunInputs)

Batches are counted as TRL counts them: per_device_train_batch_size x gradient_accumulation_steps completions an optimizer step,
and num_generations of each prompt, so a step is of that many whole groups. With num_iterations mu a step here is mu of TRL's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from corrente.config import RunConfig, schema
from corrente.config.load import COMMAND_LINE, parse_config
from corrente.errors import ConfigError
from corrente.trl import engines, objective, optimizer
from corrente.trl.config import ARGUMENTS, PASSED_ON, Arguments, check
from corrente.trl.model_arguments import compute_dtype, trusts_code

Writes = Iterable[tuple[str, Any]]
"""RunConfig keys and their values."""
HUNG_S = 600.0
"""TRL's reward functions, tools and environments have no deadline. One that hangs for ever would take its slot with it."""
DRAWN = ("temperature", "top_k", "top_p", "min_p")
"""Held-out prompts are sampled as the others are."""
TRACKERS = ("tensorboard", "wandb", "trackio")
KEEP_ALL = 1_000_000
ALL_ROWS = 1_000_000


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers and keys that the trainer's other arguments come to.

    ``rows``: of the dataset, None where it does not say. ``tables``: keys that follow from objects (model, rewards, adapters,
    tools).
    """

    model: str
    rows: int | None = None
    evaluates: bool = False
    eval_rows: int | None = None
    tables: dict[str, Any] = {}


class Steps(msgspec.Struct, frozen=True, kw_only=True):
    """``groups`` of a step, ``updates`` made with each batch, steps ``per_version``, and how many there are in all."""

    groups: int
    updates: int
    per_version: int
    total: int
    epochs: int
    per_epoch: int


def translate(args: Arguments, facts: Facts) -> RunConfig:
    """The RunConfig that ``args`` ask for. Raises ConfigError, naming the argument; combinations are for ``checks.check``."""
    check(args)
    steps = count(args, facts)
    tables: dict[str, Any] = {}
    passed = getattr(args, PASSED_ON) or {}
    for writes in (
        _direct(args),
        _run(args, facts, steps),
        optimizer.optimizer(args, updates=steps.total * steps.updates, per_step=steps.updates),
        objective.objective(args),
        objective.corrections(args),
        engines.sampling(args),
        engines.engine(args),
        engines.flow(args, steps.groups),
        _evaluation(args, facts, steps),
        _saving(args, facts, steps),
        _logging(args, steps),
        facts.tables.items(),
    ):
        for full, value in writes:
            *sections, leaf = full.split(".")
            table = tables
            for section in sections:
                table = table.setdefault(section, {})
            table[leaf] = value
    _write_dependent_keys(tables, passed)
    try:
        return parse_config(tables, [f"{k}={schema.show(v)}" for k, v in passed.items()], source="the arguments")
    except ConfigError as error:
        raise with_argument_names(error, args) from None


def _write_dependent_keys(tables: dict[str, Any], passed: Mapping[str, Any]) -> None:
    """Write the keys that depend on how tokens are drawn. vLLM says what was kept for a draw only where top_k bounds it;
    without, the weights of its samples stand for it, as they do in TRL."""
    drawn = {name: passed.get(f"sampling.{name}", tables["sampling"][name]) for name in DRAWN}
    tables["eval"] |= drawn
    weighed = "correct" in tables.get("staleness", {})
    if weighed and not drawn["top_k"] and (drawn["top_p"] < 1 or drawn["min_p"] > 0):
        tables["sampling"]["keep_support"] = False


def with_argument_names(error: ConfigError, args: Arguments) -> ConfigError:
    """Return the fault with the name of the argument that set the key it is about."""
    text = str(error).replace(COMMAND_LINE, PASSED_ON)
    at = text.split(" ", 1)[0].rstrip(":,")
    names = [
        n for n in vars(args) if n in ARGUMENTS and ARGUMENTS[n].key == at and ARGUMENTS[n].stance in ("key", "rule")
    ]
    if not names or at in (getattr(args, PASSED_ON) or {}):
        return ConfigError(text)
    return ConfigError(f"{text} ({at} is set by {' and '.join(f'{n} = {getattr(args, n)!r}' for n in names)})")


# ---- how much of what ----------------------------------------------------------------------------------------------------------


def count(args: Any, facts: Facts) -> Steps:
    """The arithmetic of batches, epochs and versions."""
    for name in ("per_device_train_batch_size", "gradient_accumulation_steps", "num_iterations"):
        if not isinstance(getattr(args, name), int) or getattr(args, name) < 1:
            raise ConfigError(f"{name} = {getattr(args, name)!r}: it must be an integer of at least 1")
    samples, size = args.per_device_train_batch_size * args.gradient_accumulation_steps, args.num_generations
    if not isinstance(size, int) or size < 2:
        raise ConfigError(
            f"num_generations = {size!r}: it must be an integer of at least 2; one has nothing to be compared with"
        )
    if samples % size:
        raise ConfigError(
            f"num_generations = {size}: per_device_train_batch_size x gradient_accumulation_steps = {samples} must be a multiple "
            "of it, because an optimizer step is made of whole groups"
        )
    groups, updates, per_version = samples // size, args.num_iterations, _per_version(args, samples)
    per_epoch = math.ceil(facts.rows / groups) if facts.rows else 0
    if args.max_steps > 0:
        if args.max_steps % updates:
            raise ConfigError(f"max_steps = {args.max_steps}: it must be a multiple of num_iterations = {updates}")
        return Steps(
            groups=groups,
            updates=updates,
            per_version=per_version,
            total=args.max_steps // updates,
            epochs=0,
            per_epoch=per_epoch,
        )
    if facts.rows is None:
        raise ConfigError(
            f"max_steps = {args.max_steps}: the dataset does not say how many rows it has, so give the steps to take"
        )
    if args.num_train_epochs <= 0 or not facts.rows:
        raise ConfigError(
            f"num_train_epochs = {args.num_train_epochs}: of {facts.rows} rows there is nothing to train on"
        )
    total = math.ceil(math.ceil(args.num_train_epochs * facts.rows) / groups)
    return Steps(
        groups=groups,
        updates=updates,
        per_version=per_version,
        total=_up(total, per_version),
        epochs=math.ceil(args.num_train_epochs),
        per_epoch=per_epoch,
    )


def _per_version(args: Any, samples: int) -> int:
    """Steps from one version of the generating weights."""
    accumulated, per_generation = args.gradient_accumulation_steps, args.steps_per_generation
    if args.generation_batch_size is not None:
        if per_generation is not None:
            raise ConfigError("generation_batch_size and steps_per_generation: give one of them")
        if args.generation_batch_size % args.per_device_train_batch_size:
            raise ConfigError(
                f"generation_batch_size = {args.generation_batch_size}: it must be a multiple of per_device_train_batch_size = "
                f"{args.per_device_train_batch_size}"
            )
        per_generation = args.generation_batch_size // args.per_device_train_batch_size
    if per_generation is None or per_generation <= accumulated:
        return args.weight_sync_steps if args.asynchronous else 1
    if args.asynchronous:
        raise ConfigError(
            f"steps_per_generation = {per_generation}: AsyncGRPOConfig says with weight_sync_steps how many steps a version lasts"
        )
    if per_generation % accumulated or args.num_iterations > 1:
        fault = (
            "a multiple of gradient_accumulation_steps"
            if per_generation % accumulated
            else "no more than them with num_iterations"
        )
        raise ConfigError(f"steps_per_generation = {per_generation}: it must be {fault} ({accumulated})")
    return per_generation // accumulated


def _up(count_: int, multiple: int) -> int:
    return -(-count_ // multiple) * multiple


def in_steps(args: Any, name: str, value: float, steps: Steps, *, versions: bool) -> int:
    """An interval in TRL's steps, as steps here; a multiple of those of a version, which a default is rounded up to."""
    updates = steps.total * steps.updates
    given = math.ceil(value * updates) if value < 1 else int(value)
    unit = steps.updates * (steps.per_version if versions else 1)
    if given % unit and args.is_set(name) and value >= 1:
        per = "num_iterations" if steps.updates > 1 else "the steps of a version"
        raise ConfigError(f"{name} = {value:g}: it must be a multiple of {per} ({unit})")
    return _up(max(given, 1), unit) // steps.updates


# ---- sections ------------------------------------------------------------------------------------------------------------------


def _direct(args: Arguments) -> Writes:
    for name, argument in ARGUMENTS.items():
        if argument.stance == "key" and hasattr(args, name):
            yield argument.key, getattr(args, name)


def _run(args: Any, facts: Facts, steps: Steps) -> Writes:
    folder = Path(args.output_dir or "trainer_output")
    yield "run.dir", str(folder / "runs")
    yield "run.name", args.run_name or "train"
    yield "run.steps", steps.total
    yield "run.prompts_per_step", steps.groups
    yield "model.path", facts.model
    yield "model.device", "cpu" if args.use_cpu else "auto"
    yield "model.dtype", compute_dtype(args)
    yield "model.trust_remote_code", trusts_code(args)
    yield "sync.every", steps.per_version
    yield "filter.zero_variance", "keep"
    yield "reward.deadline_s", HUNG_S
    if "env.kind" in facts.tables:
        yield "env.deadline_s", HUNG_S
    yield "prompts.kind", "given"
    yield "prompts.epochs", steps.epochs
    yield "prompts.shuffle", bool(args.shuffle_dataset) and args.train_sampling_strategy != "sequential"
    if args.max_prompt_length is not None:
        if "env.kind" in facts.tables:
            raise ConfigError(
                f"max_prompt_length = {args.max_prompt_length}: conversations with tools or environments are not cut"
            )
        if not isinstance(args.max_prompt_length, int) or args.max_prompt_length < 1:
            raise ConfigError(f"max_prompt_length = {args.max_prompt_length!r}: it must be at least 1, or None")
        yield "prompts.max_prompt_tokens", args.max_prompt_length
    if args.chat_template_kwargs:
        yield "chat.template_kwargs", dict(args.chat_template_kwargs)


def _evaluation(args: Any, facts: Facts, steps: Steps) -> Writes:
    strategy = _strategy(args, "eval_strategy")
    if strategy != "no" and not facts.evaluates:
        raise ConfigError(f"eval_strategy = {strategy!r}: give the trainer an eval_dataset")
    if strategy == "no" or not facts.evaluates:
        yield "eval.every", 0
    elif strategy == "epoch":
        yield "eval.every", _each_epoch(args, "eval_strategy", steps) // steps.per_version
    else:
        interval = args.logging_steps if args.eval_steps is None else args.eval_steps
        yield "eval.every", in_steps(args, "eval_steps", interval, steps, versions=True) // steps.per_version
    if facts.eval_rows:
        yield "eval.prompts", facts.eval_rows
    elif facts.evaluates:
        yield "eval.prompts", ALL_ROWS
    yield "eval.samples", args.num_generations_eval or args.num_generations
    yield "eval.deadline_s", engines.UNLIMITED_S


def _saving(args: Any, facts: Facts, steps: Steps) -> Writes:
    strategy = _strategy(args, "save_strategy")
    match strategy:
        case "no":
            yield "checkpoint.every", 0
        case "epoch":
            yield "checkpoint.every", _each_epoch(args, "save_strategy", steps)
        case _:
            yield "checkpoint.every", in_steps(args, "save_steps", args.save_steps, steps, versions=True)
    if args.save_total_limit is not None and args.save_total_limit < 1:
        raise ConfigError(f"save_total_limit = {args.save_total_limit}: it must be at least 1, or None")
    if args.load_best_model_at_end:
        _check_best(args, facts, steps, strategy)
        yield (
            "checkpoint.keep",
            KEEP_ALL,
        )  # the best may be an old one; best_checkpoint.py removes the others at the end
    else:
        yield "checkpoint.keep", args.save_total_limit or KEEP_ALL


def _check_best(args: Any, facts: Facts, steps: Steps, saves: str) -> None:
    """Raise ConfigError unless every checkpoint is evaluated, as transformers asks."""
    evaluates = _strategy(args, "eval_strategy")
    if saves == "no" or saves != evaluates or not facts.evaluates:
        raise ConfigError(
            f"load_best_model_at_end = True: it needs the same save_strategy and eval_strategy, steps or epoch, and an "
            f"eval_dataset (save_strategy = {saves!r}, eval_strategy = {evaluates!r})"
        )
    if saves == "steps":
        interval = args.logging_steps if args.eval_steps is None else args.eval_steps
        saved = in_steps(args, "save_steps", args.save_steps, steps, versions=True)
        evaluated = in_steps(args, "eval_steps", interval, steps, versions=True)
        if saved % evaluated:
            raise ConfigError(
                f"load_best_model_at_end = True: save_steps = {args.save_steps:g} must be a multiple of eval_steps = {interval:g}"
            )


def _logging(args: Any, steps: Steps) -> Writes:
    if _strategy(args, "logging_strategy") == "steps":
        in_steps(args, "logging_steps", args.logging_steps, steps, versions=False)
    wanted = args.report_to or "none"
    names = [wanted] if isinstance(wanted, str) else list(wanted)
    for name in names:
        if name not in (*TRACKERS, "none"):
            raise ConfigError(f"report_to = {name!r}: it must be of {', '.join(TRACKERS)}, or none")
    yield "observe.trackers", [name for name in names if name != "none"]
    yield "observe.project", args.project
    yield "observe.run_name", args.run_name or ""
    if args.log_completions:
        shown = args.num_completions_to_print
        yield "observe.samples", steps.groups * args.num_generations if shown is None else shown


def _each_epoch(args: Any, name: str, steps: Steps) -> int:
    if not steps.per_epoch:
        raise ConfigError(f"{name} = 'epoch': the dataset does not say how many rows an epoch has; use 'steps'")
    return _up(steps.per_epoch, steps.per_version)


def _strategy(args: Any, name: str) -> str:
    value = str(getattr(getattr(args, name), "value", getattr(args, name)))
    if value not in ("no", "steps", "epoch"):
        raise ConfigError(f"{name} = {value!r}: it must be one of no, steps, epoch")
    return value
