"""Objects and places that a trainer's constructor refuses, each with what to do instead."""

from __future__ import annotations

import os
from typing import Any

from corrente.errors import ConfigError


def refuse_objects(*, optimizers: Any, quantization_config: Any, rollout_func: Any) -> None:
    """Raise ConfigError for an object that would train otherwise than asked."""
    if tuple(optimizers or ()) not in ((), (None, None)):
        raise ConfigError(
            "optimizers: the optimizer lives in the learner, which is AdamW; see learning_rate, adam_beta1 and the like"
        )
    if quantization_config is not None:
        raise ConfigError(
            "quantization_config: the model is trained in float32 or bfloat16; give peft_config to save memory"
        )
    if rollout_func is not None:
        raise ConfigError(
            "rollout_func: it generates by itself; give environment_factory, or env with an object of corrente.env.base.Env"
        )


def check_machine() -> None:
    """Raise ConfigError where a launcher has started the script several times."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            f"WORLD_SIZE = {os.environ['WORLD_SIZE']}: start the script once, with python; engines and learner are started by it"
        )
