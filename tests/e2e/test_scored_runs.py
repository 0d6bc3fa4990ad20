"""A whole run whose reward is made by everything at once: functions, a process, models and a judge, beside real training."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from tests.e2e.test_runs import Record
from tests.e2e.tiny import tiny_config, write_model
from tests.unit.vllm_fake import Asked, Say, serving
from transformers import AutoConfig, AutoTokenizer, LlamaForSequenceClassification, LlamaForTokenClassification

from corrente.config import schema
from corrente.controller.parts import RunResult
from corrente.entrypoints.checks import check_config
from corrente.entrypoints.train import run_training

pytestmark = pytest.mark.slow

VERIFIER = """
import os, signal, time


def verify(completions, answer, log_extra):
    log_extra("verified_by", [os.getpid()] * len(completions))
    return [float(c[:1] == a) for c, a in zip(completions, answer)]


def hangs(completions):
    time.sleep(600)
"""


def classifier(folder: Path, kind: Any, labels: int) -> Path:
    write_model(folder)
    torch.manual_seed(1)
    config = AutoConfig.from_pretrained(folder, num_labels=labels)
    kind(config).save_pretrained(folder)
    return folder


def judge(asked: Asked) -> Say:
    text = asked.body["messages"][0]["content"]
    return Say(body={"choices": [{"message": {"content": str(len(text) % 11)}}]})


def scored_run(tmp_path: Path, scorers: list[dict[str, Any]], *more: str) -> tuple[RunResult, Record]:
    record = Record()
    tables = ", ".join(schema.show(scorer) for scorer in scorers)
    config = tiny_config(tmp_path, f"reward.scorers=[{tables}]", "observe.samples=8", "eval.every=0", *more)
    check_config(config)

    async def go() -> RunResult:
        return await run_training(config, sinks=[record], signals=False)

    return anyio.run(go), record


def test_run_with_every_kind_of_scorer_trains_and_reports_each(tmp_path: Path):
    (tmp_path / "verifier.py").write_text(VERIFIER)
    models = {
        "outcome": classifier(tmp_path / "outcome", LlamaForSequenceClassification, 1),
        "steps": classifier(tmp_path / "steps", LlamaForTokenClassification, 2),
        "wise": write_model(tmp_path / "wise", seed=5),
    }
    assert AutoTokenizer.from_pretrained(models["wise"]).get_vocab()

    async def main() -> tuple[RunResult, Record]:
        async with serving(judge) as fake:
            scorers = [
                {"kind": "function", "function": "repetition_penalty", "options": {"n": 2}, "weight": 0.1},
                {"kind": "process", "function": f"{tmp_path}/verifier.py:verify", "workers": 2},
                {"kind": "reward_model", "path": str(models["outcome"]), "weight": 0.2},
                {"kind": "process_reward", "path": str(models["steps"]), "weight": 0.2, "separator": "h"},
                {"kind": "judge", "url": f"{fake.url}/v1", "model": "m", "weight": 0.3},
                {"kind": "teacher", "path": str(models["wise"]), "top": 2},
            ]
            return await anyio.to_thread.run_sync(scored_run, tmp_path, scorers)

    outcome, record = anyio.run(main)
    assert (outcome.ended, outcome.steps) == ("steps", 6)
    assert outcome.counts["failed"] == 0
    last = record.steps[-1]
    for name in ("repetition_penalty", "verify", "outcome", "steps", "judge", "wise"):
        assert last[f"score/{name}_calls"] >= 12
        assert last[f"score/{name}_failed"] == last[f"score/{name}_timeouts"] == 0
        assert last[f"score/{name}_latency_p95_s"] >= 0
    for sample in record.samples:
        scores = sample["scores"]
        assert scores["wise"] is None
        expected = (
            0.1 * scores["repetition_penalty"]
            + scores["verify"]
            + 0.2 * scores["outcome"]
            + 0.2 * (scores["steps"] or 0)
            + 0.3 * scores["judge"]
        )
        assert sample["reward"] == pytest.approx(expected, abs=1e-5)
    verified_by = {sample["extra"]["verified_by"] for sample in record.samples}
    assert os.getpid() not in verified_by
    assert not [pid for pid in verified_by if Path(f"/proc/{pid}").exists()]


def test_run_with_a_verifier_that_hangs_goes_on_without_it_and_stops_when_told_to_mind(tmp_path: Path):
    (tmp_path / "verifier.py").write_text(VERIFIER)
    fine = {"kind": "process", "function": f"{tmp_path}/verifier.py:verify"}
    stuck = {"kind": "process", "function": f"{tmp_path}/verifier.py:hangs", "deadline_s": 0.05, "failure": "none"}
    outcome, record = scored_run(tmp_path, [fine, {**stuck, "workers": 4}], "run.steps=3", "filter.zero_variance=keep")
    assert outcome.steps == 3
    assert record.steps[-1]["score/hangs_timeouts"] >= 6
    assert {sample["scores"]["hangs"] for sample in record.samples} == {None}
