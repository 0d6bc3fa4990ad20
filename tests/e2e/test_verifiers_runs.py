"""Whole runs on tasks of the real verifiers package. Skipped where it is not installed."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from tests.e2e.test_conversation_runs import rise, run, talking, worst_gap

from corrente.config import RunConfig, Seeds
from corrente.errors import ConfigError

pytestmark = pytest.mark.slow

pytest.importorskip("verifiers.v1", reason="pip install verifiers", exc_type=ImportError)

TASKS = Path(__file__).with_name("verifiers_letters.py")


def _config(tmp_path: Path, *overrides: str, **options: object) -> RunConfig:
    given = _toml({"taskset": f"{TASKS}:Letters", **options})
    return talking(
        tmp_path,
        "env.kind=environment",
        "env.factory=corrente.env.adapters.verifiers:Verifiers",
        f"env.options={given}",
        "observe.samples=8",
        *overrides,
    )


def _toml(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml(item)}" for key, item in value.items()) + "}"
    return json.dumps(value)


def _seeds(config: RunConfig) -> RunConfig:
    return msgspec.structs.replace(config, prompts=Seeds())


def test_policy_learns_a_task_of_verifiers_by_the_weights_of_its_rewards(tmp_path: Path):
    outcome, record = run(_seeds(_config(tmp_path)))
    assert (outcome.ended, outcome.counts["failed"]) == ("steps", 0)
    assert rise(record, "env/rewards/letter") > 0.3
    assert rise(record, "reward/Verifiers") > 0.6
    assert worst_gap(record) < 1e-4
    tasks: dict[str, set[str]] = {}
    for sample in record.samples:
        if sample["finish_reason"] == "stop":  # a cut answer is not scored
            task = sample["extra"]["task"]
            assert sample["prompt"] == f"fgh{task[3]}de"
            tasks.setdefault(sample["prompt_id"], set()).add(task)
    assert all(len(played) == 1 for played in tasks.values())
    assert len(set.union(*tasks.values())) > 4


def test_column_says_which_tasks_are_trained_on_and_which_are_held_out(tmp_path: Path):
    config = _config(tmp_path, "run.steps=4", "eval.every=4", column="task")
    for name, tasks in (("prompts", range(4)), ("held_out", "gh")):
        rows = (json.dumps({"prompt": "", "task": task}) for task in tasks)
        (tmp_path / f"{name}.jsonl").write_text("\n".join(list(rows) * 8))
    outcome, record = run(msgspec.structs.replace(config, prompts=msgspec.structs.replace(config.prompts, epochs=8)))
    assert (outcome.ended, outcome.counts["failed"]) == ("steps", 0)
    assert {sample["prompt"] for sample in record.samples} == {f"fgh{first}de" for first in "abcd"}
    assert record.evals[-1]["eval/episodes"] == 16


def test_task_that_needs_a_container_ends_a_run_before_a_model_is_loaded(tmp_path: Path):
    config = _seeds(_config(tmp_path, config={"boxed": True}))
    (tmp_path / "model" / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(ConfigError, match=r"Letters, task 0 \(a\): Boxed\.NEEDS_CONTAINER"):
        run(config)
