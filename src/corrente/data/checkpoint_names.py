"""Names inside a run's folder: ``<run>/checkpoints/step-000050/learner`` holds the weights after step 50."""

from __future__ import annotations

import re

CHECKPOINTS = "checkpoints"
"""Folder of a run's checkpoints."""
LEARNER = "learner"
"""Folder of a checkpoint that holds the learner's half: a Hugging Face or peft directory, and the optimizer's state."""
_NAME = re.compile(r"step-(\d{6,})")


def checkpoint_name(step: int) -> str:
    """The folder of the checkpoint that is written after ``step``."""
    return f"step-{step:06d}"


def step_of_checkpoint(name: str) -> int | None:
    """The step a checkpoint was written after; None where ``name`` is not that of a checkpoint."""
    found = _NAME.fullmatch(name)
    return int(found[1]) if found else None
