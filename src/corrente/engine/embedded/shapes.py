"""Shapes of a model's parameters, from its configuration, without allocating them."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from corrente.models import pretrained


def parameter_shapes(config: PretrainedConfig) -> dict[str, tuple[int, ...]]:
    """The shape of every parameter by state-dict name, tied ones once; no parameter is allocated."""
    with torch.device("meta"):
        module: Any = pretrained.from_config(AutoModelForCausalLM, config)
    return {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
