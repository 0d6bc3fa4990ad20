"""What the benchmarks of whole runs share: start `corrente run` as a user would, and read what it wrote.

Seconds per step come from the run's own clock (time/elapsed_s), without the first step, which includes starting up. Processor
seconds are those of all processes of the run, from start to end, as the operating system counts them.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import subprocess
import sys
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

CORRENTE = Path(sys.executable).parent / "corrente"

Record = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Run:
    """One finished run: its per-step records, in order, and what it cost from start to end."""

    steps: list[Record]
    evaluations: list[Record]
    wall_s: float
    processor_s: float

    @property
    def steps_s(self) -> list[float]:
        ends_s = [r["time/elapsed_s"] for r in self.steps]
        return [after - before for before, after in pairwise(ends_s)]

    @property
    def step_s(self) -> float:
        """Median, the first step left out."""
        return median(self.steps_s)

    def span(self, name: str) -> float:
        """Growth of a running total between the end of the first step and the end of the last."""
        return self.steps[-1][name] - self.steps[0][name]

    def total(self, name: str) -> float:
        """Sum of a per-step number over the same steps."""
        return sum(r.get(name, 0.0) for r in self.steps[1:])

    def curve(self, name: str) -> list[float]:
        return [round(r[name], 4) for r in self.steps if name in r]


def run(config: str, folder: Path, *, name: str, sets: list[str] | None = None, threads: int = 0) -> Run:
    """Run a config (TOML text) in ``folder``. The run's output is shown only when it fails."""
    path = folder / f"{name}.toml"
    path.write_text(config)
    command = [str(CORRENTE), "run", str(path), "--name", name, "--set", f"run.dir={folder / 'runs'}"]
    for given in sets or []:
        command += ["--set", given]
    env = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
    if threads:
        env["OMP_NUM_THREADS"] = str(threads)
    before, start_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    wall_s, after = time.perf_counter() - start_s, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    lines = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    records: list[Record] = [json.loads(line) for line in lines]
    return Run(
        steps=[r for r in records if "version/learner" in r],
        evaluations=[r for r in records if "eval/reward" in r],
        wall_s=wall_s,
        processor_s=after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime,
    )


def machine() -> Record:
    """Where figures come from."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "python": platform.python_version(),
        "load_before": round(load, 2),
    }


def write(path: Path | None, result: Record) -> None:
    if path is not None:
        path.write_text(json.dumps(result, indent=1) + "\n")


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return names[0] if names else platform.processor()
