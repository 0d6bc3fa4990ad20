"""Shapes of a model's parameters, read off its configuration without allocating any."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from corrente.models import pretrained


def shapes(config: PretrainedConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every parameter by state-dict name, tied ones once, without allocating any."""
    with torch.device("meta"):
        module: Any = pretrained.from_config(AutoModelForCausalLM, config)
    return {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
