"""What runs leave behind on a machine that others use as well."""

from __future__ import annotations

import time
from pathlib import Path

SHARED = Path("/dev/shm")


def shared_memory() -> set[Path]:
    """What is there now."""
    return set(SHARED.iterdir()) if SHARED.is_dir() else set()


def shared_memory_left(before: set[Path], *, within_s: float = 30.0) -> set[Path]:
    """What came since ``before`` and nobody has open. What others are just making, or removing, is no longer so after a while;
    what a run left is."""
    until = time.monotonic() + within_s
    while (left := _unused(shared_memory() - before)) and time.monotonic() < until:
        time.sleep(0.5)
    return left


def _unused(shared: set[Path]) -> set[Path]:
    used: set[str] = set()
    for maps in Path("/proc").glob("[0-9]*/maps") if shared else ():
        try:
            used |= {
                line.split(maxsplit=5)[-1].strip() for line in maps.read_text().splitlines() if f"{SHARED}/" in line
            }
        except OSError:
            continue
    return {path for path in shared if str(path) not in used and path.exists()}
