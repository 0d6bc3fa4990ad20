"""All parameters are trained and shipped: the trivial kind, and the reference for the others."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from corrente import config
from corrente.adapters.base import Frozen, Load, shape_mismatch
from corrente.errors import CheckpointError


class FullAdapters:
    """See adapters.base.Adapters. A checkpoint is a Hugging Face directory."""

    def __init__(self, settings: config.Full, *, source: Path, load: Load, seed: int) -> None:
        self._load = load
        self.model: Any = load(source)

    def tensors(self) -> Mapping[str, Tensor]:
        """Every parameter and persistent buffer by state-dict name, tied aliases included; not copies."""
        return self.model.state_dict()

    def frozen(self) -> Frozen:
        """A second copy of the model."""
        return Frozen(copy.deepcopy(self.model).requires_grad_(False), nullcontext)

    def write(self, path: Path) -> None:
        self.model.save_pretrained(path)

    def read(self, path: Path) -> Mapping[str, Tensor]:
        weights = self._load(path).state_dict()
        if wrong := shape_mismatch(self.tensors(), weights):
            raise CheckpointError(f"the checkpoint {path} holds another model: {wrong}")
        return weights

    @torch.no_grad()
    def assign(self, weights: Mapping[str, Tensor]) -> None:
        for name, tensor in self.tensors().items():
            tensor.copy_(weights[name])
