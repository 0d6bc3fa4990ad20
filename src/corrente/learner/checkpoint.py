"""The learner's part of a checkpoint: a Hugging Face or peft directory that anyone can load, and learner.pt in it.

learner.pt holds optimizer state, the number of steps taken and random number generators, as tensors and numbers only: it is
read with ``weights_only=True``, so a checkpoint cannot run code. Nothing here is atomic; the caller writes aside and renames.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError

from corrente.common import rng
from corrente.errors import CheckpointError, ConfigError
from corrente.models.progress_bars import no_progress_bars

STATE = "learner.pt"
TOKENIZER = ("tokenizer*", "vocab.*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "chat_template.*")


def write_checkpoint(path: Path, *, weights: Callable[[Path], None], source: Path, state: dict[str, Any]) -> None:
    """Write into an existing empty directory: ``weights`` writes its files, tokenizer files are copied from ``source``.

    Raises CheckpointError.
    """
    try:
        with no_progress_bars():
            weights(path)
        for pattern in TOKENIZER:
            for file in sorted(source.glob(pattern)):
                shutil.copyfile(file, path / file.name)
        torch.save(state | {"rng": _rng_state()}, path / STATE)
    except (OSError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(f"cannot write a checkpoint to {path}: {error}") from error


def read_checkpoint(
    path: Path, *, weights: Callable[[Path], Mapping[str, torch.Tensor]], device: str
) -> tuple[Mapping[str, torch.Tensor], dict[str, Any]]:
    """Return what ``weights`` reads, and the state given to ``write_checkpoint``. Raises CheckpointError; changes nothing."""
    try:
        state = torch.load(path / STATE, map_location=device, weights_only=True)
        return weights(path), state
    except UnpicklingError as error:  # what torch raises for a file it did not write, or that holds more than data
        raise CheckpointError(f"cannot read the checkpoint {path}: {STATE} is damaged: {error}") from error
    except CheckpointError:
        raise
    except (OSError, RuntimeError, ValueError, EOFError, SafetensorError, ConfigError) as error:
        raise CheckpointError(f"cannot read the checkpoint {path}: {error}") from error


def restore_rng(state: dict[str, Any]) -> None:
    """Set the random number generators to where they were when ``write_checkpoint`` was called."""
    torch.set_rng_state(state["rng"]["cpu"].cpu())
    rng.restore(state["rng"].get("others", {}))
    if torch.cuda.is_available() and len(state["rng"]["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([rng.cpu() for rng in state["rng"]["cuda"]])


def _rng_state() -> dict[str, Any]:
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {"cpu": torch.get_rng_state(), "cuda": cuda, "others": rng.state()}
