"""The learning rate as a pure function of the step: linear warm-up, then constant, linear or cosine decay to 0."""

from __future__ import annotations

import math

from corrente import config


def learning_rate(learner: config.LearnerConfig, *, step: int, steps: int) -> float:
    """Rate of optimizer step ``step`` (from 0) of ``steps``.

    The first of w warm-up steps already moves: rates are lr/w, 2lr/w, ..., lr. Decay runs over the steps that follow; past
    the last step the rate stays where it ended.
    """
    warmup = learner.warmup_steps
    if step < warmup:
        return learner.lr * (step + 1) / warmup
    done = min(1.0, (step - warmup) / max(1, steps - warmup))
    match learner.schedule:
        case "constant":
            return learner.lr
        case "linear":
            return learner.lr * (1 - done)
        case "cosine":
            return learner.lr * 0.5 * (1 + math.cos(math.pi * done))
