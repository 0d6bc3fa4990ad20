"""Low-rank adapters are trained; what is shipped is the model with their product added, under the model's own names.

The frozen weights are never touched: merged ones have memory of their own and are made anew from W + (alpha / rank) B A each
time, so nothing drifts, and the same adapters give the same bits. Checkpoints are peft directories, as with ``lora``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from corrente import config
from corrente.adapters import injection
from corrente.adapters.base import Load
from corrente.adapters.lora import LoraAdapters
from corrente.errors import ConfigError


class MergedAdapters(LoraAdapters):
    """See adapters.base.Adapters."""

    def __init__(self, settings: config.LoraMerged, *, source: Path, load: Load, seed: int) -> None:
        super().__init__(settings, source=source, load=load, seed=seed)
        self._frozen_weights = {
            injection.base_name(name): tensor
            for name, tensor in self.model.state_dict().items()
            if ".lora_" not in name
        }
        self._layers = {
            f"{injection.base_name(name)}.{getattr(layer, 'parameter_name', 'weight')}": layer
            for name, layer in injection.adapted(self.model)
        }
        self._merged = {name: torch.empty_like(self._frozen_weights[name]) for name in self._layers}
        self._refuse_shared()

    @torch.no_grad()
    def tensors(self) -> Mapping[str, Tensor]:
        """Every parameter and persistent buffer by the model's state-dict names; the merged ones are overwritten by the next
        call."""
        for name, layer in self._layers.items():
            torch.add(self._frozen_weights[name], layer.get_delta_weight(injection.NAME), out=self._merged[name])
        return self._frozen_weights | self._merged

    def _refuse_shared(self) -> None:
        """A weight that two layers share, one of them adapted, is two weights once it is merged."""
        owners: dict[int, list[str]] = {}
        for name, tensor in self._frozen_weights.items():
            owners.setdefault(tensor.data_ptr(), []).append(name)
        for name in self._layers:
            shared = owners[self._frozen_weights[name].data_ptr()]
            if len(shared) > 1:
                raise ConfigError(
                    f'adapters.targets: {" and ".join(shared)} are one weight, which adapters.kind = "lora_merged" cannot '
                    'ship as two; leave that layer out, or use adapters.kind = "lora"'
                )
