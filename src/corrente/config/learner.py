"""The learner's optimizer, and the backend axis: how an optimizer step is executed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from corrente.config.section import Kind, Natural, NonNegative, Positive, PositiveFloat, Section

OptimizerName = Literal[
    "adamw",
    "adamw_8bit",
    "paged_adamw",
    "paged_adamw_8bit",
    "lion",
    "lion_8bit",
    "adafactor",
    "sgd",
    "adagrad",
    "rmsprop",
]
OPTIMIZER_PACKAGES: Mapping[str, str] = dict.fromkeys(
    ("adamw_8bit", "paged_adamw", "paged_adamw_8bit", "lion", "lion_8bit"), "bitsandbytes"
)
"""Optimizers that need a package of their own."""
INSTALL: Mapping[str, str] = {"bitsandbytes": "pip install bitsandbytes"}
ScheduleName = Literal[
    "constant",
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
    "inverse_sqrt",
    "cosine_with_min_lr",
    "cosine_warmup_with_min_lr",
    "warmup_stable_decay",
]


class Single(Kind, frozen=True, kw_only=True, tag="single"):
    """One device."""


class LearnerConfig(Section, frozen=True, kw_only=True):
    lr: PositiveFloat = 1e-5
    """Learning rate."""
    optimizer: OptimizerName = "adamw"
    """8-bit and paged ones, and lion, need bitsandbytes and a GPU."""
    optimizer_args: dict[str, Any] = msgspec.field(default_factory=dict[str, Any])
    """More arguments of the optimizer's class, such as momentum of sgd."""
    schedule: ScheduleName = "constant"
    """Course of the learning rate after the warm-up, over run.steps; linear and cosine end at 0. Others are transformers' own."""
    schedule_args: dict[str, Any] = msgspec.field(default_factory=dict[str, Any])
    """Arguments of transformers' schedules, such as num_cycles, power, min_lr or num_decay_steps."""
    warmup_steps: Natural = 0
    """Steps in which the learning rate rises to lr."""
    weight_decay: NonNegative = 0.0
    """Decoupled, as in AdamW."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of the gradient's running mean and square, of adamw and lion."""
    eps: PositiveFloat = 1e-8
    """Added to the denominator of the update, of adamw."""
    max_grad_norm: NonNegative = 1.0
    """Largest norm of a step's gradient, scaled down above it. 0: no clipping."""
    micro_batch_tokens: Positive = 2048
    """Distinct tokens of one forward pass; does not change the gradient."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time."""
    router_aux_loss_coef: NonNegative = 0.0
    """Of a mixture of experts: weight of the load-balancing loss. 0: off."""
