"""The files of a peft directory: ``adapter_config.json`` and ``adapter_model.safetensors``, which anything that knows peft loads.

A checkpoint of the learner is one, and an engine that loads adapters from disk is given one per version. A version's directory
is written once: its name holds the version, it appears whole (written under another name, then renamed), and writing it twice is
refused.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from corrente import config
from corrente.adapters import injection
from corrente.adapters.base import Factor, shape_mismatch
from corrente.errors import CheckpointError, SyncError

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"


def version_name(run: str, version: int) -> str:
    """The name of a version's adapter, on disk and in an engine: "<run>-v<version>". No two versions share one."""
    return f"{run}-v{version}"


def write_adapter(path: Path, tensors: Mapping[str, Tensor], made: Any) -> None:
    """Write both files into an existing directory. ``made``: peft's configuration, of ``injection.inject_adapters``."""
    made.save_pretrained(path)
    flat = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}
    save_file(flat, path / WEIGHTS, metadata={"format": "pt"})


def read_adapter(path: Path, *, device: str = "cpu") -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The configuration as it was written, and the tensors by name. Raises CheckpointError."""
    try:
        given = json.loads((path / CONFIG).read_text(encoding="utf-8"))
        return given, load_file(path / WEIGHTS, device=device)
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"cannot read the adapter in {path}: {error}") from error


class Exporter:
    """Writes the shipped tensors as one peft directory per version, for an engine that loads adapters from disk.

    ``source`` is the directory of the base model. Reads no weights; ConfigError as ``injection.inject_adapters``.
    """

    def __init__(self, settings: config.Lora, *, source: Path) -> None:
        model = injection.meta_model(source)
        self._made = injection.inject_adapters(model, settings, source=source)
        self._own = injection.adapter_parameters(model)
        self.factors: dict[str, Factor] = injection.adapter_factors(model)

    def write(self, root: Path, tensors: Mapping[str, Tensor], *, run: str, version: int) -> Path:
        """Write ``root``/"<run>-v<version>" and return it. SyncError when the tensors are not those the settings ask for, when
        that version was written before, or the disk fails; nothing is left behind then."""
        if wrong := shape_mismatch(self._own, tensors):
            raise SyncError(f"version {version} is not an adapter of this run: {wrong}")
        final = root / version_name(run, version)
        if final.exists():
            raise SyncError(f"{final} exists: a version of an adapter is written once")
        aside = root / f".{final.name}.writing"
        try:
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
            write_adapter(aside, tensors, self._made)
            aside.rename(final)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(aside, ignore_errors=True)
            raise SyncError(f"the adapter of version {version} could not be written to {root}: {error}") from error
        return final
