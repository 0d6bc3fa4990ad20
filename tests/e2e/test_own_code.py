"""A model with Python code of its own, from the command line and in a trainer: refused unasked, and run where it is trusted."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.e2e.tiny import tiny_config, write_model
from tests.unit.own_code import FILE, give_code

from corrente.config.load import dump_config

pytestmark = pytest.mark.slow

MAIN = "from corrente.cli.main import main; main()"
REWARDS = """
def fraction(completions, answer, **_):
    return [sum(c == a for c in text) / max(1, len(text)) for text, a in zip(completions, answer)]
"""
TRUST = ("--set", "model.trust_remote_code=true")
SCRIPT = """
from corrente import {name}Config, {name}Trainer


def fraction(completions, answer, **_):
    return [sum(c == a for c in text) / max(1, len(text)) for text, a in zip(completions, answer)]


trainer = {name}Trainer(
    model="own",
    reward_funcs=[fraction, "judge"],
    args={name}Config(
        output_dir="out", max_steps=2, per_device_train_batch_size=4, num_generations=4, max_completion_length=6,
        gradient_checkpointing=False, disable_tqdm=True, logging_strategy="no", trust_remote_code={trust},
    ),
    train_dataset=[{{"prompt": text, "answer": "a"}} for text in ("abcd", "bcde", "cdef", "dabc")],
)
trainer.train()
trainer.evaluate(trainer.train_dataset)
trainer.save_model("saved")
print(type(trainer.model).__name__, type(trainer.processing_class).__name__)
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with own/, whose model and tokenizer come with code that writes to ``marker``, and run.toml, which trains it."""
    (tmp_path / "rewards.py").write_text(REWARDS)
    functions = f'reward.functions=["{tmp_path}/rewards.py:fraction"]'
    config = tiny_config(
        tmp_path,
        functions,
        f'model.path="{tmp_path}/own"',
        "runtime.kind=procs",
        "buffer.kind=window",
        "checkpoint.every=3",
    )
    folder = give_code(write_model(tmp_path / "own"), tmp_path / "marker")
    give_code(folder, tmp_path / "marker", tokenizer=True)
    (tmp_path / "run.toml").write_text(dump_config(config))
    return tmp_path


def run(place: Path, *arguments: str, answer: str | None = "y\n" * 1000) -> subprocess.CompletedProcess[str]:
    """A Python program in ``place``, whoever it asks told ``answer``; None: there is nobody to ask."""
    heard = {"input": answer} if answer is not None else {"stdin": subprocess.DEVNULL}
    return subprocess.run(
        [sys.executable, "-c", *arguments],
        cwd=place,
        env={**os.environ, "HF_MODULES_CACHE": str(place / "modules"), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        **heard,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("answer", ["y\n" * 1000, None])
@pytest.mark.parametrize(
    "command",
    [
        ("run", "run.toml", "--dry-run"),
        ("run", "run.toml"),
        ("eval", "run.toml"),
        ("eval", "run.toml", "--model", "own"),
    ],
)
def test_command_refuses_a_model_with_code_without_asking(place: Path, command: tuple[str, ...], answer: str | None):
    done = run(place, MAIN, *command, answer=answer)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("corrente: model.trust_remote_code = false: model.path = ")
    assert FILE in done.stderr
    assert "Do you wish to run" not in done.stderr
    assert not (place / "marker").exists()
    assert not (place / "runs").exists()


def test_trusted_model_trains_is_evaluated_and_exported_with_its_code(place: Path):
    done = run(place, MAIN, "run", "run.toml", *TRUST)
    assert done.returncode == 0, done.stderr
    assert (place / "marker").exists()
    learner = place / "runs/tiny/checkpoints/step-000006/learner"
    assert (learner / FILE).read_text() == (place / "own" / FILE).read_text()
    again = run(place, MAIN, "eval", "runs/tiny")
    assert again.returncode == 0, again.stderr
    (place / "marker").unlink()
    refused = run(place, MAIN, "eval", "runs/tiny", "--set", "model.trust_remote_code=false")
    assert refused.returncode == 2
    assert run(place, MAIN, "push", "runs/tiny", "--out", "pushed").returncode == 0
    assert not (place / "marker").exists()
    assert (place / "pushed" / FILE).is_file()
    card = (place / "pushed" / "README.md").read_text()
    assert 'AutoModelForCausalLM.from_pretrained("PATH", trust_remote_code=True)' in card


@pytest.mark.parametrize("kind", ["lora", "lora_merged"])
def test_adapters_of_a_trusted_model_train(place: Path, kind: str):
    done = run(place, MAIN, "run", "run.toml", *TRUST, "--set", f"adapters.kind={kind}")
    assert done.returncode == 0, done.stderr


def test_trusted_code_that_cannot_be_imported_is_a_wrong_setting(place: Path):
    with (place / "own" / FILE).open("a") as code:
        code.write("raise RuntimeError('not today')\n")
    done = run(place, MAIN, "run", "run.toml", *TRUST)
    assert done.returncode == 2
    assert f"{FILE} of" in done.stderr
    assert "cannot be imported: RuntimeError: not today" in done.stderr


@pytest.mark.parametrize("name", ["GRPO", "AsyncGRPO"])
def test_trainer_trains_a_trusted_model_and_a_trusted_reward_model(place: Path, name: str):
    give_code(write_judge(place / "judge"), place / "marker")
    done = run(place, SCRIPT.format(name=name, trust=True), answer=None)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "OwnForCausalLM OwnTokenizer"
    assert (place / "saved" / FILE).is_file()


@pytest.mark.parametrize("name", ["GRPO", "AsyncGRPO"])
def test_trainer_refuses_models_with_code_without_asking(place: Path, name: str):
    give_code(write_judge(place / "judge"), place / "marker")
    done = run(place, SCRIPT.format(name=name, trust=False))
    assert done.returncode == 1
    assert "ConfigError: model.trust_remote_code = false" in done.stderr
    assert not (place / "marker").exists()


def test_model_that_transformers_knows_trains_without_its_code(place: Path):
    folder = write_model(place / "known")
    for tokenizer in (False, True):
        give_code(folder, place / "marker", model_type="llama", tokenizer=tokenizer)
    done = run(place, MAIN, "run", "run.toml", "--set", f'model.path="{folder}"')
    assert done.returncode == 0, done.stderr
    assert not (place / "marker").exists()
    assert not (place / "runs/tiny/checkpoints/step-000006/learner" / FILE).exists()


def write_judge(folder: Path) -> Path:
    from transformers import AutoConfig, LlamaForSequenceClassification

    write_model(folder)
    LlamaForSequenceClassification(AutoConfig.from_pretrained(folder, num_labels=1)).save_pretrained(folder)
    return folder
