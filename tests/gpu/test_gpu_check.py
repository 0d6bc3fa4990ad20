"""The prepared device check itself: on a GPU where there is one, and on the CPU, so that it works the day it is needed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "benchmarks" / "gpu"


def _check(*arguments: str, script: str = "check.py") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPTS / script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)


@pytest.mark.slow
def test_device_check_passes_on_the_cpu():
    done = _check("--device", "cpu", "--tiny", "--dtypes", "float32", "--paths", "lean")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all checks passed" in done.stdout


@pytest.mark.slow
def test_whole_runs_pass_on_the_cpu():
    done = _check("--device", "cpu", "--only", "inline", "shm", script="run.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all runs passed" in done.stdout


@pytest.mark.gpu
def test_whole_runs_pass_on_the_gpu():
    done = _check(script="run.py")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.gpu
def test_device_check_passes_on_the_gpu():
    done = _check("--tiny")
    assert done.returncode == 0, done.stdout + done.stderr
