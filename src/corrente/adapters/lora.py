"""Low-rank adapters are trained, and they alone are shipped. A checkpoint is a peft directory.

The policy a KL is measured to is the model with its adapters switched off: there is no second copy of it. Where the adapters
start from a directory (``init``), it is the model with the adapters they started as.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from corrente import config
from corrente.adapters import directory, injection
from corrente.adapters.base import Frozen, Load, shape_mismatch
from corrente.errors import CheckpointError, ConfigError

OTHER_KINDS = (
    "use_dora",
    "use_rslora",
    "lora_bias",
    "modules_to_save",
    "trainable_token_indices",
    "alora_invocation_tokens",
)
"""Options of a peft directory that change the function and that are not trained here."""


class LoraAdapters:
    """See adapters.base.Adapters."""

    def __init__(self, settings: config.Lora | config.LoraMerged, *, source: Path, load: Load, seed: int) -> None:
        injection.verify_targets(source, settings)
        self.model: Any = load(source)
        self._settings = settings
        self._made = injection.inject_adapters(self.model, settings, source=source, seed=seed)
        if settings.init:
            self.assign(self._initial(Path(settings.init)))

    def tensors(self) -> Mapping[str, Tensor]:
        """The adapters alone, by the names of a peft directory; not copies."""
        return {name: parameter.detach() for name, parameter in self._own().items()}

    def frozen(self) -> Frozen:
        """The same model: without its adapters, or with those it was loaded with."""
        if not self._settings.init:
            return Frozen(self.model, partial(injection.adapters_disabled, self.model))
        initial = {name: parameter.detach().clone() for name, parameter in self._own().items()}
        return Frozen(self.model, partial(injection.adapters_replaced, self.model, initial))

    def write(self, path: Path) -> None:
        directory.write_adapter(path, self._own(), self._made)

    def read(self, path: Path) -> Mapping[str, Tensor]:
        given, weights = directory.read_adapter(path)
        if wrong := adapter_difference(given, self._settings, self._own(), weights):
            raise CheckpointError(f"the checkpoint {path} holds another adapter: {wrong}")
        return weights

    @torch.no_grad()
    def assign(self, weights: Mapping[str, Tensor]) -> None:
        for name, parameter in self._own().items():
            parameter.copy_(weights[name])

    def _own(self) -> dict[str, torch.nn.Parameter]:
        return injection.adapter_parameters(self.model)

    def _initial(self, path: Path) -> Mapping[str, Tensor]:
        try:
            given, weights = directory.read_adapter(path)
        except CheckpointError as error:
            raise ConfigError(f"adapters.init = {str(path)!r}: {error}") from error
        if wrong := adapter_difference(given, self._settings, self._own(), weights):
            raise ConfigError(f"adapters.init = {str(path)!r} does not fit the other keys of [adapters]: {wrong}")
        return weights


def adapter_difference(
    given: Mapping[str, Any],
    settings: config.Lora | config.LoraMerged,
    own: Mapping[str, Tensor],
    weights: Mapping[str, Tensor],
) -> str:
    """Describe the first difference between an adapter that was read and these settings; empty where it fits."""
    if given.get("peft_type") != "LORA":
        return f"it is of type {given.get('peft_type')}, not LORA"
    for key in OTHER_KINDS:
        if given.get(key):
            return f"it has {key} = {given[key]}"
    for key, name, value in (("r", "rank", settings.rank), ("lora_alpha", "alpha", settings.alpha)):
        if given.get(key) != value:
            return f"adapters.{name} is {given.get(key)} there and {value:g} here"
    return f"adapters.targets differ: {wrong}" if (wrong := shape_mismatch(own, weights)) else ""
