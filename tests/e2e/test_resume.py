"""kill -9 at any point, then resume: a dozen kills of each job, of the campaign that resume_harness.py runs at length.

The harness forks, so it runs in an interpreter of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.e2e.tiny import tiny_config

from corrente.config.load import dump_config
from corrente.observe.jsonl import read_metrics

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-c", "from corrente.cli.main import main; main()", "run"]
REWARDS = """
def fraction(completions, answer):
    return [sum(c == a for c in text) / max(1, len(text)) for text, a in zip(completions, answer)]
"""


@pytest.mark.parametrize(
    ("job", "kills"),
    [("plain", 6), ("every", 4), ("mixture", 2), ("lora", 2), ("evaluated", 2), ("window", 2), ("versions", 2)],
)
def test_run_that_is_killed_again_and_again_is_the_run_that_nobody_killed(job: str, kills: int):
    command = [sys.executable, "-m", "tests.e2e.resume_harness", "--job", job, "--kills", str(kills), "--seed", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def _config(tmp_path: Path, *overrides: str) -> Path:
    rewards = tmp_path / "rewards.py"
    rewards.write_text(REWARDS)
    path = tmp_path / "tiny.toml"
    path.write_text(dump_config(tiny_config(tmp_path, f'reward.functions=["{rewards}:fraction"]', *overrides)))
    return path


def _start(path: Path, *arguments: str, temporary: Path) -> subprocess.Popen[str]:
    temporary.mkdir(exist_ok=True)
    env = {**os.environ, "TMPDIR": str(temporary)}
    command = [*COMMAND, str(path), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)


def test_two_runs_at_once_do_not_collide(tmp_path: Path):
    """Of the same name, through the file system and shared memory: the second gets a folder of its own, and both end well."""
    path = _config(tmp_path, "runtime.kind=procs", "runtime.placement=shared", "run.steps=3", "eval.every=0")
    runs = [_start(path, temporary=tmp_path / "tmp") for _ in range(2)]
    for run in runs:
        _, err = run.communicate(timeout=500)
        assert (run.returncode, err) == (0, "")
    folders = [tmp_path / "runs" / name for name in ("tiny", "tiny-2")]
    for folder in folders:
        assert [record["step"] for record in read_metrics(folder)] == [1, 2, 3]
        assert (folder / "checkpoints" / "step-000003" / "COMMIT").exists()
    assert sorted(entry.name for entry in (tmp_path / "runs").iterdir()) == ["tiny", "tiny-2"]
    assert not list((tmp_path / "tmp").iterdir())


def test_run_that_goes_on_cannot_be_resumed_beside_itself(tmp_path: Path):
    path = _config(tmp_path, "run.steps=2000", "checkpoint.every=1", "eval.every=0")
    first = _start(path, temporary=tmp_path / "tmp")
    assert first.stdout is not None
    try:
        for line in first.stdout:
            if "2/2000" in line:
                break
        second = _start(path, "--resume", temporary=tmp_path / "tmp")
        _, err = second.communicate(timeout=240)
        assert second.returncode == 2
        assert "is still going on" in err
        assert first.poll() is None
    finally:
        first.kill()
        first.communicate()
