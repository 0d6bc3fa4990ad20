"""Checks of the adapters section of a config, as far as files tell; before a model is loaded. No torch, no peft.

The layers of a model are read from the headers of its weight files. Where those name experts one by one, which a mixture holds
fused once it is loaded, the learner checks the names, which it does before it reads weights.
"""

from __future__ import annotations

import json
import struct
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from corrente.adapters.base import matches_layer, unmatched_message
from corrente.config import Full, Lora, LoraMerged, RunConfig
from corrente.config.schema import kind_of
from corrente.errors import ConfigError

ALL_LINEAR = "all-linear"
LARGEST_HEADER_BYTES = 100_000_000


def check(config: RunConfig, *, model: Path | None) -> None:
    """Raise ConfigError, naming the key, its value and what is allowed. ``model``: its directory, None while it has none."""
    adapters = config.adapters
    if isinstance(adapters, Full):
        return
    if find_spec("peft") is None:
        raise ConfigError(f'adapters.kind = "{kind_of(adapters)}" needs peft: pip install "corrente[lora]"')
    _check_keys(adapters)
    if adapters.init:
        _check_init(adapters)
    if model is not None:
        _check_targets(adapters, parameters_of(model))


def cautions(config: RunConfig) -> list[str]:
    """Warnings for the start of a run, about settings that work."""
    adapters = config.adapters
    if isinstance(adapters, Full) or not adapters.dropout:
        return []
    return [
        f"adapters.dropout = {adapters.dropout:g}: engines sample without dropout, so the ratio of an unchanged policy is not 1; "
        "0 trains the policy that sampled"
    ]


def parameters_of(model: Path) -> list[str]:
    """The tensor names in a directory's safetensors files; none where they cannot be read."""
    index = model / "model.safetensors.index.json"
    try:
        if index.is_file():
            return sorted(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
        return sorted(name for file in sorted(model.glob("*.safetensors")) for name in _header(file))
    except (OSError, ValueError, KeyError, struct.error):
        return []


def _check_keys(adapters: Lora | LoraMerged) -> None:
    targets = list(adapters.targets)
    if not targets and not adapters.target_parameters:
        raise ConfigError('adapters.targets = []: give at least one layer, or ["all-linear"]')
    if ALL_LINEAR in targets and len(targets) > 1:
        raise ConfigError(f'adapters.targets = {targets}: "all-linear" stands alone, or leave it out of the list')
    if not all(targets) or not all(adapters.target_parameters):
        raise ConfigError("adapters.targets and adapters.target_parameters are lists of names, none of them empty")
    if adapters.target_parameters and adapters.dropout:
        raise ConfigError(
            f"adapters.dropout = {adapters.dropout:g}: it must be 0 with adapters.target_parameters, which have no input to drop"
        )


def _check_init(adapters: Lora | LoraMerged) -> None:
    file = Path(adapters.init) / "adapter_config.json"
    try:
        given: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except OSError:
        raise ConfigError(
            f"adapters.init = {adapters.init!r}: it must be a peft directory; there is no {file}"
        ) from None
    except ValueError as error:
        raise ConfigError(f"adapters.init = {adapters.init!r}: {file} is damaged: {error}") from None
    for key, name, value in (("r", "rank", adapters.rank), ("lora_alpha", "alpha", adapters.alpha)):
        if given.get(key) != value:
            raise ConfigError(f"adapters.{name} = {value:g}: adapters.init = {adapters.init!r} has {given.get(key)}")


def _check_targets(adapters: Lora | LoraMerged, parameters: list[str]) -> None:
    if not parameters or any(".experts." in name for name in parameters):
        return
    layers = sorted({name.rpartition(".")[0] for name in parameters} | {"lm_head"})
    for target in adapters.targets:
        if target != ALL_LINEAR and not matches_layer(target, layers):
            raise ConfigError(unmatched_message("adapters.targets", target, layers))
    for target in adapters.target_parameters:
        if not matches_layer(target, parameters):
            raise ConfigError(unmatched_message("adapters.target_parameters", target, parameters, parts=2))


def _header(file: Path) -> list[str]:
    """Read the tensor names of a safetensors file: eight bytes give the length of a JSON table of them."""
    with file.open("rb") as data:
        (size,) = struct.unpack("<Q", data.read(8))
        if size > LARGEST_HEADER_BYTES:
            return []
        return [name for name in json.loads(data.read(size)) if name != "__metadata__"]
