"""The entry points for Python: train and evaluate in a script, a thread and a notebook, and the loop put together by hand."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.tiny import answer_fraction, tiny_config

from corrente import RunInputs, evaluate, train
from corrente.config import GivenRows, RunConfig
from corrente.config.load import load_config
from corrente.entrypoints.run_folder import CONFIG
from corrente.entrypoints.train_result import TrainResult
from corrente.errors import ConfigError
from corrente.observe.jsonl import read_metrics

ROOT = Path(__file__).parents[2]
ROWS = [{"prompt": first + second + "ab", "answer": "a"} for first in "abcdefgh" for second in "abcdefgh"]


def config(tmp_path: Path, *overrides: str) -> RunConfig:
    function = f"reward.functions=['{Path(__file__).with_name('tiny.py')}:answer_fraction']"
    return tiny_config(tmp_path, function, "run.steps=4", "eval.every=2", *overrides)


def in_a_thread(work: Any) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found[0]


def in_a_notebook(work: Any) -> Any:
    async def cell() -> Any:
        return work()

    return asyncio.run(cell())


@pytest.mark.slow
@pytest.mark.parametrize(
    "call", [lambda work: work(), in_a_thread, in_a_notebook], ids=["script", "thread", "notebook"]
)
def test_train_returns_the_numbers_of_the_run_wherever_it_is_called(tmp_path: Path, call: Any):
    result = call(lambda: train(config(tmp_path)))
    records = read_metrics(result.folder)
    assert isinstance(result, TrainResult)
    assert (result.ended, result.steps, result.version) == ("steps", 4, 4)
    assert result.samples == sum(int(r.get("samples/trained", 0)) for r in records) == 32
    assert result.metrics["reward/mean"] == [r["reward/mean"] for r in records if "reward/mean" in r][-1]
    assert result.metrics["train/loss"] == records[-1]["train/loss"]
    assert result.eval_before["eval/reward"] == records[0]["eval/reward"]
    assert result.eval_after["eval/reward"] == records[-1]["eval/reward"]
    assert result.checkpoint == result.folder / "checkpoints" / "step-000004"
    assert {"config.toml", "metrics.jsonl", "samples.jsonl", "timeline.jsonl"} <= {
        p.name for p in result.folder.iterdir()
    }
    assert repr(result).startswith("<TrainResult: 4 steps (all taken), 32 samples, reward 0.")
    assert str(result).splitlines()[0] == "steps         4 (all taken)"


@pytest.mark.slow
def test_train_goes_on_from_a_checkpoint_and_evaluate_takes_its_folder(tmp_path: Path):
    first = train(config(tmp_path))
    on = train(config(tmp_path, "run.steps=6"), resume=True)
    assert (on.folder, on.steps, on.samples) == (first.folder, 6, 48)
    assert on.eval_before == first.eval_before
    evaluation = evaluate(on.folder)
    assert evaluation.metrics["eval/reward"] == pytest.approx(on.eval_after["eval/reward"])
    assert repr(evaluation).startswith("<Evaluation of step 6, version 6: reward 0.")
    earlier = evaluate(on.folder, checkpoint="step-000004", overrides=["eval.prompts=2"])
    assert (earlier.step, earlier.metrics["eval/episodes"]) == (4, 2.0)
    assert len((on.folder / "eval.jsonl").read_text().splitlines()) == 2


@pytest.mark.slow
def test_objects_replace_what_the_config_names_and_the_folder_says_so(tmp_path: Path):
    objects = RunInputs(reward_functions=[answer_fraction], train_dataset=ROWS[8:], eval_dataset=ROWS[:8])
    result = train(config(tmp_path), inputs=objects)
    recorded = load_config(result.folder / CONFIG)
    assert isinstance(recorded.prompts, GivenRows)
    assert recorded.reward.functions == ()
    assert result.eval_after["eval/episodes"] == 8
    with pytest.raises(ConfigError, match="was made with Python objects"):
        evaluate(result.folder)
    held_out = RunInputs(reward_functions=[answer_fraction], eval_dataset=ROWS[:8])
    assert evaluate(result.folder, inputs=held_out).metrics["eval/reward"] == result.eval_after["eval/reward"]


def test_wrong_setting_is_refused_before_anything_is_written(tmp_path: Path):
    made = config(tmp_path, "run.steps=5", "sync.every=2")
    with pytest.raises(ConfigError, match=r"run\.steps = 5"):
        train(made)
    assert not Path(made.run.dir).exists()
    with pytest.raises(ConfigError, match=r"overrides = .*change the config itself"):
        evaluate(made, overrides=["eval.samples=2"])


def test_importing_the_package_imports_neither_torch_nor_the_parts():
    code = "import corrente, sys; corrente.load_config; assert not {'torch', 'corrente.entrypoints'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_loop_put_together_by_hand_learns():
    loop = ROOT / "examples" / "loop.py"
    assert len(loop.read_text().splitlines()) <= 80
    env = {**os.environ, "OMP_NUM_THREADS": "1"}  # threads that wait for one another take minutes on a busy machine
    done = subprocess.run([sys.executable, loop], env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    rewards = [float(line.split("reward ")[1].split()[0]) for line in done.stdout.splitlines() if "reward " in line]
    assert len(rewards) == 20
    assert sum(rewards[-5:]) > sum(rewards[:5]) + 1  # of about 0.5 each
    assert done.stdout.splitlines()[-1].startswith("RunResult(ended='steps', steps=20, version=20")
