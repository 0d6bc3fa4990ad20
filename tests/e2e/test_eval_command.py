"""`corrente eval` as a user sees it, and ``evaluate`` as a program calls it: the same numbers as beside training, no learner."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import anyio
import pytest
from tests.e2e.tiny import answer_fraction, tiny_config

from corrente.config.load import dump_config, load_config
from corrente.controller import checkpoint_folder
from corrente.entrypoints.checks import check_config
from corrente.entrypoints.eval_target import config_of_checkpoint, config_of_model
from corrente.entrypoints.evaluate import run_evaluation
from corrente.entrypoints.inputs import RunInputs
from corrente.entrypoints.run_folder import CONFIG, run_folder_path
from corrente.entrypoints.train import run_training
from corrente.errors import ConfigError
from corrente.observe.jsonl import JsonlSink, read_metrics

pytestmark = pytest.mark.slow

COMMAND = [sys.executable, "-c", "from corrente.cli.main import main; main()", "eval"]
REWARDS = """
def fraction(completions, answer):
    return [sum(c == a for c in text) / max(1, len(text)) for text, a in zip(completions, answer)]
"""
GIVEN = RunInputs(reward_functions=[answer_fraction])


def trained(tmp_path: Path, *overrides: str) -> Path:
    """The folder of a run of 4 steps, with checkpoints of the second and the fourth."""
    (tmp_path / "rewards.py").write_text(REWARDS)
    functions = f'reward.functions=["{tmp_path}/rewards.py:fraction"]'
    config = tiny_config(
        tmp_path, functions, "run.steps=4", "checkpoint.every=2", "eval.every=2", "buffer.kind=none", *overrides
    )
    folder = run_folder_path(config)
    folder.mkdir(parents=True)
    (folder / CONFIG).write_text(dump_config(config))
    anyio.run(lambda: run_training(config, sinks=[JsonlSink(folder)], signals=False))
    return folder


def command(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *map(str, arguments)], capture_output=True, text=True, timeout=240, check=False)


def records(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "eval.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    "overrides",
    [[], ["runtime.kind=procs", "runtime.placement=shared"], ["adapters.kind=lora"], ["adapters.kind=lora_merged"]],
)
def test_evaluation_of_a_checkpoint_gives_what_was_measured_beside_training(tmp_path: Path, overrides: list[str]):
    folder = trained(tmp_path, *overrides)
    beside = {record["step"]: record["eval/reward"] for record in read_metrics(folder) if "eval/reward" in record}
    config = load_config(folder / CONFIG)
    for name, step in (("step-000002", 2), ("step-000004", 4)):
        config_of = config_of_checkpoint(config, folder / "checkpoints" / name)
        check_config(config_of)
        evaluation = anyio.run(lambda: run_evaluation(config_of, step=step, version=step))  # noqa: B023 (run here and now)
        assert evaluation.metrics["eval/reward"] == pytest.approx(beside[step], abs=1e-6)
        assert evaluation.metrics["eval/version"] == step
        assert (len(evaluation.groups), evaluation.metrics["eval/lost"]) == (4, 0)
    assert {path.name for path in folder.iterdir()} <= {
        *("checkpoints", "config.toml", "metrics.jsonl", "samples.jsonl", "timeline.jsonl", "events.jsonl", "logs")
    }


def test_eval_command_prints_a_table_and_keeps_the_result(tmp_path: Path):
    folder = trained(tmp_path)
    done = command(folder, "--set", "eval.samples=4", "--set", "eval.pass_at=[1, 4]", "--set", "eval.pass_reward=0.5")
    assert (done.returncode, done.stderr) == (0, "step-000004: starting the engine\n")
    head, row, count, where = done.stdout.splitlines()
    assert head.split() == ["prompts", "reward", "std", "pass@1", "pass@4", "tokens", "cut", "off"]
    assert row.startswith("all")
    assert count == "16 completions by step-000004 (step 4, version 4)"
    assert where == f"added to {folder / 'eval.jsonl'}"
    earlier = command(folder, "--checkpoint", "step-000002")
    assert earlier.returncode == 0
    first, second = records(folder)
    assert (first["of"], first["step"], second["of"], second["step"]) == ("step-000004", 4, "step-000002", 2)
    assert first["eval"]["samples"] == 4
    assert first["metrics"]["eval/pass@4"] >= first["metrics"]["eval/pass@1"]
    assert sorted(first["prompts"]) == [f"eval/{row}" for row in range(4)]
    assert all(len(rewards) == 4 for rewards in first["prompts"].values())


def test_eval_command_takes_a_config_or_another_model(tmp_path: Path):
    folder = trained(tmp_path)
    learned = folder / "checkpoints" / "step-000004" / "learner"
    exported = tmp_path / "exported"
    shutil.copytree(learned, exported)
    of_run = command(folder, "--model", exported, "--out", tmp_path / "out.jsonl")
    assert (of_run.returncode, of_run.stdout.splitlines()[-1]) == (0, f"added to {tmp_path / 'out.jsonl'}")
    of_config = command(folder / CONFIG)
    assert of_config.returncode == 0
    assert not (folder / "eval.jsonl").exists()
    beside = [record["eval/reward"] for record in read_metrics(folder) if "eval/reward" in record]
    line = json.loads((tmp_path / "out.jsonl").read_text())
    assert line["metrics"]["eval/reward"] == pytest.approx(beside[-1], abs=1e-6)
    assert f"all      {beside[0]:.3f}" in of_config.stdout


def test_eval_command_refuses_what_it_cannot_evaluate(tmp_path: Path):
    folder = trained(tmp_path)
    cases = (
        ((folder, "--checkpoint", "step-000009"), "it must be one of step-000002, step-000004"),
        ((tmp_path,), "it has no config.toml"),
        ((tmp_path / "nosuch",), "does not exist; give the folder of a run"),
        (
            (folder, "--set", "prompts.kind=given"),
            "made with Python objects, which its config cannot bring back; name the prompts",
        ),
        ((folder, "--set", "reward.functions=[]"), "name the rewards: --set 'reward.functions=["),
        ((folder / CONFIG, "--checkpoint", "step-000002"), "it is one of a run"),
        ((folder, "--model", tmp_path / "nowhere"), "it must be a directory with a model"),
        ((folder, "--set", "eval.pass_at=[2]"), "pass@2 needs at least 2 samples"),
        ((folder, "--out", tmp_path / "nowhere" / "x.jsonl"), "it must be a file in a folder that exists"),
        ((folder, "--out", tmp_path), "it must be a file in a folder that exists"),
        ((folder, "--set", "prompts.eval_path="), "there are no held-out prompts"),
    )
    for arguments, words in cases:
        refused = command(*arguments)
        assert refused.returncode == 2, refused.stderr
        assert words in refused.stderr
        assert "Traceback" not in refused.stderr
    assert not (folder / "eval.jsonl").exists()


def test_evaluate_takes_reward_functions_and_leaves_nothing(tmp_path: Path):
    evaluation = anyio.run(
        lambda: run_evaluation(tiny_config(tmp_path, "eval.every=0", "eval.prompts=3"), inputs=GIVEN)
    )
    assert len(evaluation.groups) == 3
    assert {path.name for path in tmp_path.iterdir()} == {"model", "prompts.jsonl", "held_out.jsonl"}


def test_adapter_directory_is_evaluated_on_the_model_of_the_config(tmp_path: Path):
    folder = trained(tmp_path, "adapters.kind=lora", "adapters.rank=4")
    learned = checkpoint_folder.latest(folder / "checkpoints")
    assert learned is not None
    plain = tiny_config(tmp_path)
    config = config_of_model(plain, learned / "learner")
    assert (config.adapters.rank, config.model.path) == (4, plain.model.path)  # type: ignore[union-attr]
    beside = [record["eval/reward"] for record in read_metrics(folder) if "eval/reward" in record]
    assert anyio.run(lambda: run_evaluation(config, inputs=GIVEN)).metrics["eval/reward"] == pytest.approx(
        beside[-1], abs=1e-6
    )
    with pytest.raises(ConfigError, match="it must be a directory"):
        config_of_model(plain, tmp_path / "nowhere")


def test_what_an_evaluation_loses_is_counted_and_named(tmp_path: Path):
    def breaks(completions, **_):
        raise KeyError("gold")

    evaluation = anyio.run(lambda: run_evaluation(tiny_config(tmp_path), inputs=RunInputs(reward_functions=[breaks])))
    assert (evaluation.metrics["eval/lost"], evaluation.metrics["eval/episodes"]) == (4, 0)
    assert "breaks: KeyError: 'gold'" in evaluation.error
    assert "eval/reward" not in evaluation.metrics
