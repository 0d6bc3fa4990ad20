"""TRL's optimizer, schedule and memory arguments, as keys of the section learner."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

from corrente.errors import ConfigError

Writes = Iterable[tuple[str, Any]]

SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
    **{
        name: name
        for name in (
            "cosine_with_restarts",
            "polynomial",
            "inverse_sqrt",
            "cosine_with_min_lr",
            "cosine_warmup_with_min_lr",
            "warmup_stable_decay",
        )
    },
}
"""Names of transformers -> learner.schedule."""
OPTIMIZERS = {
    **dict.fromkeys(
        (
            "adamw_torch",
            "adamw_torch_fused",
            "adamw_torch_xla",
            "adamw_torch_npu_fused",
            "adamw_apex_fused",
            "adamw_hf",
            "adamw_anyprecision",
        ),
        "adamw",
    ),
    **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit", "adamw_torch_8bit"), "adamw_8bit"),
    **dict.fromkeys(("paged_adamw", "paged_adamw_32bit"), "paged_adamw"),
    **dict.fromkeys(("lion", "lion_32bit", "paged_lion_32bit"), "lion"),
    **dict.fromkeys(("lion_8bit", "paged_lion_8bit"), "lion_8bit"),
    **{name: name for name in ("paged_adamw_8bit", "adafactor", "sgd", "adagrad", "rmsprop")},
}
"""Names of transformers -> learner.optimizer."""


def optimizer(args: Any, *, updates: int, per_step: int) -> Writes:
    """Keys of the section learner. ``updates``: TRL's optimizer steps of the run, of which ``per_step`` are one here."""
    kind = str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type))
    if kind not in SCHEDULES:
        raise ConfigError(f"lr_scheduler_type = {kind!r}: it must be one of {', '.join(SCHEDULES)}")
    asked = args.warmup_steps or args.warmup_ratio or 0
    warmup = math.ceil(asked * updates) if asked < 1 else int(asked)
    yield "learner.schedule", SCHEDULES[kind]
    if args.lr_scheduler_kwargs:
        yield "learner.schedule_args", dict(args.lr_scheduler_kwargs)
    name = str(getattr(args.optim, "value", args.optim))
    if name not in OPTIMIZERS:
        raise ConfigError(f"optim = {name!r}: it must be one of {', '.join(OPTIMIZERS)}")
    yield "learner.optimizer", OPTIMIZERS[name]
    if args.optim_args:
        yield "learner.optimizer_args", optimizer_args(args.optim_args)
    if args.router_aux_loss_coef is not None:
        yield "learner.router_aux_loss_coef", args.router_aux_loss_coef
    yield "learner.warmup_steps", 0 if kind == "constant" else math.ceil(warmup / per_step)
    yield "learner.max_grad_norm", 0.0 if args.max_grad_norm is None else args.max_grad_norm
    yield "learner.betas", [args.adam_beta1, args.adam_beta2]
    recompute = args.gradient_checkpointing if args.activation_checkpointing is None else args.activation_checkpointing
    yield "learner.gradient_checkpointing", bool(recompute)
    budget = getattr(args, "token_budget", None)
    if budget is not None:
        if budget < 1:
            raise ConfigError(
                f"token_budget = {budget}: micro-batches are always cut by tokens; it must be at least 1, or None"
            )
        yield "learner.micro_batch_tokens", budget


def optimizer_args(given: Any) -> dict[str, Any]:
    """Arguments of an optimizer from a dictionary, or from "name=value, name=value" as in transformers."""
    if isinstance(given, Mapping):
        return dict(given)
    found: dict[str, Any] = {}
    for part in str(given).replace(" ", "").split(","):
        name, equals, value = part.partition("=")
        if not equals:
            raise ConfigError(f'optim_args = {given!r}: {part!r} is not of the form "name=value"')
        try:
            found[name] = json.loads(value.lower())
        except ValueError:
            found[name] = value
    return found
