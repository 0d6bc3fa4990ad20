"""The learning rate as a pure function of the step: linear warm-up, then constant, linear or cosine decay to 0, or one of
transformers' schedules.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import msgspec

from corrente import config
from corrente.errors import ConfigError

OWN = ("constant", "linear", "cosine")
"""Schedules that are computed here; the others are transformers', their warm-up with them."""


def learning_rate(learner: config.LearnerConfig, *, step: int, steps: int) -> float:
    """Rate of optimizer step ``step`` (from 0) of ``steps``.

    The first of w warm-up steps already moves: rates are lr/w, 2lr/w, ..., lr. Decay runs over the steps that follow; past
    the last step the rate stays where it ended. Transformers' schedules begin their warm-up at 0. ConfigError when one of them
    does not take learner.schedule_args.
    """
    if learner.schedule not in OWN:
        return _transformers_rate(msgspec.json.encode(learner), step=step, steps=steps)
    warmup = learner.warmup_steps
    if step < warmup:
        return learner.lr * (step + 1) / warmup
    done = min(1.0, (step - warmup) / max(1, steps - warmup))
    match learner.schedule:
        case "linear":
            return learner.lr * (1 - done)
        case "cosine":
            return learner.lr * 0.5 * (1 + math.cos(math.pi * done))
        case _:
            return learner.lr


def check_schedule(learner: config.LearnerConfig, *, steps: int) -> None:
    """Raise ConfigError when learner.schedule_args are not those of learner.schedule."""
    if learner.schedule in OWN and learner.schedule_args:
        raise ConfigError(
            f'learner.schedule_args = {learner.schedule_args}: learner.schedule = "{learner.schedule}" has none; leave it out'
        )
    learning_rate(learner, step=0, steps=steps)


def _transformers_rate(learner: bytes, *, step: int, steps: int) -> float:
    made, lr = _schedule(learner, steps)
    return lr * float(made(min(step, steps)))


@cache
def _schedule(encoded: bytes, steps: int) -> tuple[Any, float]:
    """The factor of transformers' schedule as a function of the step, and the rate that it is a factor of."""
    import torch
    from transformers import get_scheduler

    learner = msgspec.json.decode(encoded, type=config.LearnerConfig)
    dummy = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=learner.lr)
    try:
        made: Any = get_scheduler(
            learner.schedule,
            dummy,
            num_warmup_steps=learner.warmup_steps,
            num_training_steps=steps,
            scheduler_specific_kwargs=dict(learner.schedule_args),
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f'learner.schedule_args = {learner.schedule_args}: "{learner.schedule}" does not take them: {error}'
        ) from error
    return made.lr_lambdas[0], learner.lr
