"""`corrente run` as a user sees it: the screen, the folder, stopping, going on, and what is said when it cannot."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.e2e.tiny import slow_config, tiny_config

from corrente.config.load import dump_config
from corrente.controller import checkpoint_folder
from corrente.entrypoints.stop_signals import REPEAT_S
from corrente.observe.jsonl import read_metrics, read_timeline

pytestmark = pytest.mark.slow

COMMAND = [sys.executable, "-c", "from corrente.cli.main import main; main()"]
REWARDS = """
import threading

def fraction(completions, answer):
    return [sum(c == a for c in text) / max(1, len(text)) for text, a in zip(completions, answer)]

def hangs(completions):
    print("hanging", flush=True)
    threading.Event().wait()

def breaks(completions):
    raise KeyError("gold")
"""


def _write(tmp_path: Path, *overrides: str, reward: str = "fraction") -> Path:
    (tmp_path / "rewards.py").write_text(REWARDS)
    functions = f'reward.functions=["{tmp_path}/rewards.py:{reward}"]'
    path = tmp_path / "tiny.toml"
    path.write_text(dump_config(tiny_config(tmp_path, functions, *overrides)))
    return path


def _run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, "run", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


@contextmanager
def _running(*arguments: str | Path) -> Iterator[subprocess.Popen[str]]:
    """The command in a process group of its own, as a shell starts it."""
    command = [*COMMAND, "run", *map(str, arguments)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def _read_until(process: subprocess.Popen[str], words: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if words in line:
            return
    pytest.fail(f"the command ended before it said {words!r}: {process.communicate()[1]}")


def _interrupt(process: subprocess.Popen[str], number: signal.Signals = signal.SIGINT) -> None:
    """Ctrl-C: the terminal sends SIGINT to the whole group. A service manager or a scheduler does so with SIGTERM, a terminal
    that is closed with SIGHUP."""
    os.killpg(process.pid, number)


def test_run_fills_its_folder_and_says_what_came_of_it(tmp_path: Path):
    done = _run(_write(tmp_path, "run.steps=4", "eval.every=2"))
    assert (done.returncode, done.stderr) == (0, "")
    folder = tmp_path / "runs" / "tiny"
    lines = done.stdout.splitlines()
    assert lines[0] == f"{folder}: starting engine and learner"
    assert [line.split()[1] for line in lines if line.startswith("step ")] == ["1/4", "2/4", "3/4", "4/4"]
    assert any(line.startswith("steps         4 (all taken)") for line in lines)
    assert any(line.startswith("prompts       8 trained") for line in lines)
    assert lines[-1] == f"folder        {folder}"
    always = {"checkpoints", "config.toml", "inputs.json", "metrics.jsonl", "samples.jsonl", "timeline.jsonl"}
    assert {p.name for p in folder.iterdir()} - {"events.jsonl"} == always
    metrics = read_metrics(folder)
    assert [record["step"] for record in metrics] == [0, 1, 2, 3, 4]
    assert {"eval/reward", "engine/idle_fraction"} <= metrics[-1].keys()
    assert {"reward/mean", "lag/mean"} <= set().union(*metrics)
    assert {"learn", "sync"} <= {span["track"] for span in read_timeline(folder)}
    assert {"prompt", "completion", "reward"} <= json.loads(
        (folder / "samples.jsonl").read_text().splitlines()[0]
    ).keys()


@pytest.mark.parametrize(
    ("runtime", "number"),
    [("inline", signal.SIGINT), *(("procs", number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))],
)
def test_interrupted_run_stops_with_a_checkpoint_and_goes_on(tmp_path: Path, runtime: str, number: signal.Signals):
    path = _write(tmp_path, "run.steps=200", "eval.every=0", f"runtime.kind={runtime}")
    with _running(path) as process:
        _read_until(process, "step   2/200")
        _interrupt(process, number)
        out, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (0, "")
    folder = tmp_path / "runs" / "tiny"
    assert "stopping at the next version, with a checkpoint" in out
    assert out.splitlines()[-1] == f"to go on      corrente run {folder / 'config.toml'} --resume"
    taken = read_metrics(folder)[-1]["step"]
    assert 2 <= taken < 200
    assert (folder / "checkpoints" / f"step-{taken:06d}" / "COMMIT").exists()
    on = _run(folder / "config.toml", "--resume", "--set", f"run.steps={taken + 3}")
    assert (on.returncode, on.stderr) == (0, "")
    assert [record["step"] for record in read_metrics(folder)] == list(range(1, taken + 4))
    assert f"steps         {taken + 3} (all taken)" in on.stdout


def test_killed_run_goes_on_with_its_half_written_completions(tmp_path: Path):
    """kill -9. At unchanged weights what the resumed run trains on begins with what the last checkpoint had of it."""
    path = _write(tmp_path)
    given = f'reward.functions=["{tmp_path}/rewards.py:fraction"]', "learner.lr=1e-30", "checkpoint.every=1"
    path.write_text(dump_config(slow_config(tmp_path, *given, "runtime.kind=procs", "run.steps=300")))
    with _running(path) as process:
        _read_until(process, "step   2/300")
        process.kill()
        process.wait(60)
    folder = tmp_path / "runs" / "tiny"
    newest = checkpoint_folder.latest(folder / "checkpoints")
    assert newest is not None
    snapshot = checkpoint_folder.read(newest)
    answers = {u.prompt_id: [a for record in u.answers for a in record] for u in snapshot.unfinished if u.group is None}
    begun = {name: [a.completion.tokens for a in said if a.completion is not None] for name, said in answers.items()}
    assert any(len(tokens) for said in begun.values() for tokens in said)
    on = _run(folder / "config.toml", "--resume", "--set", f"run.steps={snapshot.step + 3}")
    assert (on.returncode, on.stderr) == (0, "")
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    trained = [sample for sample in samples if sample["trained_at_version"] >= snapshot.version]
    seen = [sample for sample in trained[-3 * 8 :] if sample["prompt_id"] in begun]
    assert seen
    for name in {sample["prompt_id"] for sample in seen}:
        lengths = [sample["tokens"] for sample in seen if sample["prompt_id"] == name]
        assert len(lengths) == 4
        assert all(whole >= len(part) for whole, part in zip(lengths, begun[name], strict=False))


def test_second_signal_stops_at_once_where_it_is_not_the_first_again(tmp_path: Path):
    """``timeout`` signals the process, and then its group."""
    begun = tmp_path / "begun"
    code = "import pathlib, time\n\ndef slow(inputs):\n    pathlib.Path({!r}).touch()\n    time.sleep(600)\n"
    (tmp_path / "slow.py").write_text(code.format(str(begun)))
    slow = ("run.steps=200", "runtime.kind=procs", "eval.every=0", f"algo.objective.kind={tmp_path}/slow.py:slow")
    with _running(_write(tmp_path, *slow)) as process:
        while not begun.exists():
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        _interrupt(process, signal.SIGTERM)
        _read_until(process, "stopping at the next version")
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=REPEAT_S + 0.5)
        _interrupt(process)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    first, kept = err.splitlines()
    assert first == "corrente: stopped"
    assert f"no checkpoint to go on from; what was recorded is in {tmp_path}" in kept


def test_setting_that_only_the_model_shows_to_be_wrong_leaves_no_folder(tmp_path: Path):
    path = _write(tmp_path, "run.steps=2", "env.kind=environment", f"env.factory={tmp_path}/rewards.py:breaks")
    failed = _run(path)
    assert failed.returncode == 2, failed.stderr
    assert not (tmp_path / "runs" / "tiny").exists()


def test_interrupt_before_everything_has_started_ends_the_command(tmp_path: Path):
    nobody = ("runtime.kind=procs", "engine.kind=vllm", 'engine.urls=["http://127.0.0.1:9"]', "sync.kind=disk")
    with _running(_write(tmp_path, "run.steps=200", *nobody)) as process:
        _read_until(process, "waiting for http://127.0.0.1:9")
        _interrupt(process)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    stopped, kept = err.splitlines()
    assert stopped == "corrente: stopped"
    assert "there is no checkpoint to go on from" in kept


def test_reward_that_always_fails_ends_the_run_with_its_name(tmp_path: Path):
    failed = _run(_write(tmp_path, "run.steps=200", reward="breaks"))
    assert failed.returncode == 1
    assert failed.stderr.startswith("corrente: FailureBudgetError: ")
    assert "breaks: KeyError: 'gold'" in failed.stderr.splitlines()[0]
    assert "Traceback" not in failed.stderr + failed.stdout


@pytest.mark.parametrize("runtime", ["inline", "procs"])
def test_weights_that_are_cut_off_are_refused_with_their_file(tmp_path: Path, runtime: str):
    path = _write(tmp_path, f"runtime.kind={runtime}")
    weights = tmp_path / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    failed = _run(path)
    assert (failed.returncode, failed.stderr.count("\n")) == (2, 1)
    assert "model.safetensors cannot be read" in failed.stderr
    assert f"model.path = '{tmp_path / 'model'}'" in failed.stderr


def test_checkpoint_that_cannot_be_read_is_not_advised(tmp_path: Path):
    path = _write(tmp_path, "run.steps=2", "checkpoint.every=1")
    assert _run(path).returncode == 0
    folder = tmp_path / "runs" / "tiny"
    (folder / "checkpoints" / "step-000002" / "learner" / "model.safetensors").unlink()
    failed = _run(folder / "config.toml", "--resume", "--set", "run.steps=4")
    assert failed.returncode == 1
    assert "cannot read the checkpoint" in failed.stderr
    assert "to go on" not in failed.stderr


def test_full_disk_ends_the_run_and_leaves_earlier_checkpoints(tmp_path: Path):
    """No file may grow past 100 KiB, as if the disk were full: the optimizer's state does not fit, the model's weights do."""
    done = _run(_write(tmp_path, "run.steps=2"))
    assert (done.returncode, done.stderr) == (0, "")
    folder = tmp_path / "runs" / "tiny"
    limited = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (100 << 10, 100 << 10)); "
    command = [sys.executable, "-c", limited + COMMAND[-1], "run", str(folder / "config.toml"), "--resume", "--set"]
    full = subprocess.run([*command, "run.steps=4"], capture_output=True, text=True, timeout=240, check=False)
    assert full.returncode == 1
    assert full.stderr.startswith("corrente: CheckpointError: ")
    assert "step-000004" in full.stderr
    assert "earlier ones are intact" in full.stderr
    assert "Traceback" not in full.stderr + full.stdout
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-000002"]
    on = _run(folder / "config.toml", "--resume", "--set", "run.steps=4")
    assert (on.returncode, on.stderr) == (0, "")
    assert "steps         4 (all taken)" in on.stdout


def test_run_without_a_checkpoint_or_of_other_settings_cannot_go_on(tmp_path: Path):
    path = _write(tmp_path, "run.steps=1")
    (tmp_path / "runs" / "tiny").mkdir(parents=True)
    (tmp_path / "runs" / "tiny" / "config.toml").write_text(path.read_text())
    failed = _run(path, "--resume")
    assert failed.returncode == 1
    assert "nothing to resume" in failed.stderr
    refused = _run(path, "--resume", "--set", "run.seed=3")
    assert refused.returncode == 2
    assert refused.stderr.startswith("corrente: resume: run.seed = 3, but the run in")


def test_terminal_shows_a_live_table(tmp_path: Path):
    """Through a pseudo-terminal: the table is drawn in place, and the summary follows it."""
    main, side = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "120", "LINES": "40"}
    command = [*COMMAND, "run", str(_write(tmp_path, "run.steps=3", "eval.every=2"))]
    with subprocess.Popen(command, stdout=side, stderr=side, stdin=side, env=environment) as process:
        os.close(side)
        shown = b""
        try:
            while part := os.read(main, 65536):
                shown += part
        except OSError:  # Linux ends a pseudo-terminal whose other side is closed with EIO
            pass
        process.wait(timeout=60)
    os.close(main)
    text = shown.decode()
    assert process.returncode == 0
    assert "\x1b[" in text
    assert text.count("waits for") + text.count("tokens/s, idle") > 2
    for part in ("held-out", "3 of 3", "bound 1", "(all taken)"):
        assert part in text, part
