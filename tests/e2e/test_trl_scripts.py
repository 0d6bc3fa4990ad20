"""Scripts in the shape that TRL's documentation teaches, run as they are, but for engine and learner in this process."""

from __future__ import annotations

import contextlib
import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.e2e import vllm_tiny
from tests.e2e.tiny import write_model
from tests.e2e.tool_tasks import TEMPLATE
from transformers import AutoTokenizer

from corrente.trl.config import Arguments

pytestmark = pytest.mark.slow

SCRIPTS = Path(__file__).with_name("trl_scripts")
HERE = {"runtime.kind": "inline", "runtime.threads": 1}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The tiny model, with a chat template in its letters."""
    folder = write_model(tmp_path / "model", context=256)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def run(name: str, model: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any] = HERE) -> dict[str, Any]:
    """What a script leaves behind. ``settings`` are added to what it passes through."""
    made = Arguments.__init__

    def with_settings(self: Arguments, output_dir: str | None = None, **values: Any) -> None:
        made(self, output_dir, **{**values, "corrente": {**settings, **(values.get("corrente") or {})}})

    monkeypatch.setattr(Arguments, "__init__", with_settings)
    monkeypatch.setattr(sys, "argv", [name, str(model), str(model.parent / "out")])
    with contextlib.redirect_stdout(sys.stderr):
        return runpy.run_path(str(SCRIPTS / f"{name}.py"), run_name="__main__")


def logs(left: dict[str, Any], name: str) -> list[float]:
    return [entry[name] for entry in left["trainer"].state.log_history if name in entry]


def test_basic_script_learns(model: Path, monkeypatch: pytest.MonkeyPatch):
    left = run("basic", model, monkeypatch)
    state = left["trainer"].state
    assert (state.global_step, state.max_steps, state.epoch) == (6, 6, 2.0)
    assert [entry["step"] for entry in state.log_history] == [2, 4, 6, 6]
    assert {
        "loss",
        "grad_norm",
        "learning_rate",
        "reward",
        "reward_std",
        "rewards/reward_letters/mean",
        "entropy",
    } <= set(state.log_history[0])
    assert (model.parent / "out" / "checkpoint-6" / "model.safetensors").is_file()


def test_several_rewards_are_weighed(model: Path, monkeypatch: pytest.MonkeyPatch):
    left = run("several_rewards", model, monkeypatch)
    for name in ("answer_reward", "length_reward", "limit"):
        assert logs(left, f"rewards/{name}/mean"), name
    assert logs(left, "asked") == [4.0, 4.0]


def test_conversations_reach_model_and_rewards_as_messages(model: Path, monkeypatch: pytest.MonkeyPatch):
    left = run("conversational", model, monkeypatch)
    prompt, completion = left["seen"][0]
    assert [message["role"] for message in prompt] == ["system", "user"]
    assert [message["role"] for message in completion] == ["assistant"]


def test_tools_are_called(model: Path, monkeypatch: pytest.MonkeyPatch):
    left = run("tools", model, monkeypatch)
    assert max(logs(left, "reward")) > 0


def test_environment_gives_the_reward(model: Path, monkeypatch: pytest.MonkeyPatch):
    left = run("environment", model, monkeypatch)
    assert set(left["tasks"]) == {0, 1, 2, 3}
    assert max(logs(left, "rewards/Bell/mean")) > 0


def test_lora_trains_an_adapter_alone(model: Path, monkeypatch: pytest.MonkeyPatch):
    left = run("lora", model, monkeypatch)
    final = model.parent / "out" / "final"
    assert (final / "adapter_model.safetensors").is_file()
    assert not (final / "model.safetensors").exists()
    assert logs(left, "kl")[-1] > 0
    assert type(left["trainer"].model).__name__ == "PeftModelForCausalLM"


def test_evaluation_and_callbacks_follow_the_run(model: Path, monkeypatch: pytest.MonkeyPatch):
    before = (model / "model.safetensors").read_bytes()
    left = run("eval_and_callbacks", model, monkeypatch)
    events = left["events"]
    assert events[0] == ("begin", 4)
    assert [at for kind, at in events if kind == "step"] == [1, 2, 3, 4]
    assert [kind for kind, _ in events].count("save") == 2
    assert len(logs(left, "eval_reward")) == 3
    assert left["trainer"].state.best_metric is not None
    assert left["trainer"].model is left["model"]
    assert (model.parent / "out" / "model.safetensors").read_bytes() != before
    assert (model / "model.safetensors").read_bytes() == before
    assert left["metrics"]["eval_reward"] == pytest.approx(logs(left, "eval_reward")[-1])


def test_script_writes_metrics_state_and_card_afterwards(
    model: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    run("afterwards", model, monkeypatch)
    out = model.parent / "out"
    printed = capfd.readouterr().err
    assert "***** train metrics *****" in printed
    assert "Training completed." in printed
    results = json.loads((out / "all_results.json").read_text())
    assert results["train_samples"] == 4
    assert results["eval_reward"] == json.loads((out / "eval_results.json").read_text())["eval_reward"]
    assert "eval_reward" not in json.loads((out / "train_results.json").read_text())
    assert json.loads((out / "trainer_state.json").read_text())["global_step"] == 1
    assert (out / "model.safetensors").is_file()
    assert "letters" in (out / "README.md").read_text()


@pytest.mark.vllm
def test_vllm_script_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    served = vllm_tiny.write_model(tmp_path / "model", ends=True)
    settings = {
        "runtime.start_deadline_s": 600.0,
        "engine.start_deadline_s": 600.0,
        "runtime.placement": "shared",
        "engine.max_context": 256,
    }
    left = run("vllm", served, monkeypatch, settings=settings)
    assert left["trainer"].state.global_step == 2
