"""Every benchmark still runs, at its smallest: figures that nobody can measure again are no figures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
MODEL, CONFIG = "MODEL", str(ROOT / "examples" / "addition2.toml")

SMALLEST = {
    "agentic": f"{MODEL} --virtual-steps 0 --steps 2 --prompts 1 --max-tokens 8",
    "corrections": f"{CONFIG} --steps 1 --lags 0 --seeds 0 --variants dppo_tv --prompts 4 --every 1",
    "curves": f"{CONFIG} --steps 2 --every 2 --prompts 4 --seeds 0 --variants sync --set sampling.max_tokens=4",
    "delta": f"{MODEL} --lr 1e-6 --steps 1 --prompts 1 --group 2 --tokens 4 --zero-variance keep",
    "door": "",
    "endtoend": f"{MODEL} --steps 2 --rounds 1 --variants window",
    "engine": f"{MODEL} --sequences 8 --tokens 8 --rounds 1",
    "inflight": f"{MODEL} --steps 2 --repeats 1 --kinds swap",
    "learner": f"{MODEL} --case arithmetic --repeats 1",
    "overlap": f"{MODEL} --steps 2 --scenarios plain",
    "placement": f"{MODEL} --steps 1 --tokens 2 --settings shared priority",
    "planner": "--steps 1",
    "pool": f"{MODEL} --replicas 1 --requests 4 --tokens 4 --repeats 1",
    "publish": f"{MODEL} --transport shm --repeats 1 --sequences 8",
    "simulate": "--steps 2 --groups 200 --repeats 1",
    "toy_corrections": "--steps 2 --every 1 --lags 2 --seeds 0 --variants dppo_tv",
}
"""What each is told, so that it takes seconds."""
VLLM = {"vllm_update": f"{MODEL} --requests 2 --tokens 16 --publishes 1 --intervals 8"}


def test_every_benchmark_is_here():
    """What the others share are no benchmarks."""
    scripts = {path.stem for path in BENCHMARKS.glob("*.py")} - {"runs", "variants"}
    assert scripts == set(SMALLEST | VLLM)


@pytest.mark.model
@pytest.mark.parametrize("name", SMALLEST)
def test_it_runs_and_writes_its_figures(name: str, smollm2: Path, tmp_path: Path):
    _run(name, SMALLEST[name], smollm2, tmp_path)


@pytest.mark.vllm
@pytest.mark.parametrize("name", VLLM)
def test_those_of_vllm_do_too(name: str, smollm2: Path, tmp_path: Path):
    _run(name, VLLM[name], smollm2, tmp_path)


def _run(name: str, arguments: str, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    told = [str(model) if word == MODEL else word for word in arguments.split()]
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), *told, "--json", str(out)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    assert json.loads(out.read_text())
