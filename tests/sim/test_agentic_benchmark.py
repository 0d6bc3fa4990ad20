"""benchmarks/agentic.py: the waits of tools overlap with both sides, as it says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "agentic.py"


@pytest.mark.slow
def test_calls_are_hidden_where_enough_episodes_are_ahead(tmp_path: Path):
    out = tmp_path / "out.json"
    sizes = ["--virtual-steps", "14", "--turns", "2", "--versions", "3", "--shares", "1.5"]
    command = [sys.executable, str(BENCHMARK), *sizes, "--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    (row,) = json.loads(out.read_text())["virtual"]
    assert row["of_bound"] >= 0.95
    assert row["of_bound"] <= 1.01  # nothing beats the slower side
    assert row["sync_s"] > 1.5 * row["run_s"]
