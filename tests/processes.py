"""Processes that this one started."""

from __future__ import annotations

import os
from pathlib import Path


def children() -> set[int]:
    """Pids of the processes that the main thread has started and not yet waited for."""
    return {int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()}
