"""The learner's optimizer, and the backend axis: how an optimizer step is executed."""

from __future__ import annotations

from typing import Literal

from corrente.config.section import Kind, Natural, NonNegative, Positive, PositiveFloat, Section


class Single(Kind, frozen=True, kw_only=True, tag="single"):
    """One device."""


class LearnerConfig(Section, frozen=True, kw_only=True):
    lr: PositiveFloat = 1e-5
    """Learning rate of AdamW."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate after the warm-up, over run.steps; linear and cosine end at 0."""
    warmup_steps: Natural = 0
    """Steps in which the learning rate rises to lr."""
    weight_decay: NonNegative = 0.0
    """Decoupled, as in AdamW."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of the gradient's running mean and square."""
    eps: PositiveFloat = 1e-8
    """Added to the denominator of the update."""
    max_grad_norm: NonNegative = 1.0
    """Largest norm of a step's gradient, scaled down above it. 0: no clipping."""
    micro_batch_tokens: Positive = 2048
    """Distinct tokens of one forward pass; does not change the gradient."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time."""
    router_aux_loss_coef: NonNegative = 0.0
    """Of a mixture of experts: weight of the load-balancing loss. 0: off."""
