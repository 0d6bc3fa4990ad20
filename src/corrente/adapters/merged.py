"""Low-rank adapters are trained; the model with their product added is shipped, under the model's own names.

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
        self._layers = {
            f"{injection.base_name(name)}.{getattr(layer, 'parameter_name', 'weight')}": layer
            for name, layer in injection.adapted_layers(self.model)
        }
        frozen = self._frozen_weights()
        self._merged = {name: torch.empty_like(frozen[name]) for name in self._layers}
        self._refuse_shared(frozen)

    @torch.no_grad()
    def tensors(self) -> Mapping[str, Tensor]:
        """Every parameter and persistent buffer by the model's state-dict names; the merged ones are overwritten by the next
        call."""
        frozen = self._frozen_weights()
        for name, layer in self._layers.items():
            torch.add(frozen[name], layer.get_delta_weight(injection.NAME), out=self._merged[name])
        return frozen | self._merged

    def _frozen_weights(self) -> dict[str, Tensor]:
        """Everything but the adapters, by the names of the model without them; not copies."""
        return {
            injection.base_name(name): tensor
            for name, tensor in self.model.state_dict().items()
            if ".lora_" not in name
        }

    def _refuse_shared(self, frozen: Mapping[str, Tensor]) -> None:
        """Raise ConfigError where two layers share a weight and one of them has an adapter: merged, they would be two weights."""
        owners: dict[int, list[str]] = {}
        for name, tensor in frozen.items():
            owners.setdefault(tensor.data_ptr(), []).append(name)
        for name in self._layers:
            shared = owners[frozen[name].data_ptr()]
            if len(shared) > 1:
                raise ConfigError(
                    f'adapters.targets: {" and ".join(shared)} are one weight, which adapters.kind = "lora_merged" cannot '
                    'ship as two; leave that layer out, or use adapters.kind = "lora"'
                )
