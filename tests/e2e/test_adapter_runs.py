"""Whole runs that train adapters: they learn, ship adapters alone over any transport, and resume from peft directories."""

from __future__ import annotations

import warnings
from pathlib import Path

import peft
import pytest
import torch
from tests.e2e.test_runs import run
from tests.e2e.tiny import tiny_config
from transformers import AutoModelForCausalLM

from corrente.controller import checkpoint_folder

pytestmark = pytest.mark.slow

LORA = ("adapters.kind=lora", "adapters.rank=8", "adapters.alpha=32")
ADAPTER_BYTES = 4 * 2 * 8 * (2 * (32 + 32) + 2 * (32 + 16) + 3 * (32 + 64))
"""Of the tiny model: two layers, rank 8, float32; q, o, then k, v, then the MLP."""


@pytest.mark.parametrize("kind", ["lora", "lora_merged"])
def test_run_with_adapters_learns(tmp_path: Path, kind: str):
    config = tiny_config(
        tmp_path,
        *LORA[1:],
        f"adapters.kind={kind}",
        "run.steps=15",
        "eval.every=5",
        "learner.lr=0.05",
        "buffer.kind=none",
        "algo.beta=0.01",
    )
    outcome, record = run(config)
    assert (outcome.ended, outcome.version) == ("steps", 15)
    assert record.evals[-1]["eval/reward"] > record.evals[0]["eval/reward"] + 0.3
    assert max(step["mismatch/logprob_gap_max"] for step in record.steps) < 1e-4
    assert record.steps[0]["kl/reference"] == pytest.approx(0, abs=1e-9)
    assert record.steps[-1]["kl/reference"] > 1e-4
    shipped = record.steps[-1]["publish/bytes"]
    assert shipped == (ADAPTER_BYTES if kind == "lora" else pytest.approx(4 * (11 * 32 + 2 * 9280 + 32), rel=0.01))


@pytest.mark.parametrize(
    "overrides",
    [
        ["sync.kind=shm", "inflight.kind=snapshot", "staleness.max=2"],
        ["sync.kind=disk", "inflight.kind=recompute", "staleness.max=2"],
        ["sync.kind=disk", "sync.payload=delta", "buffer.kind=none"],
        ["sync.kind=http", "inflight.kind=resume", "buffer.kind=none"],
    ],
    ids=" ".join,
)
def test_any_transport_and_policy_carries_adapters(tmp_path: Path, overrides: list[str]):
    outcome, record = run(tiny_config(tmp_path, *LORA, "runtime.kind=procs", "run.steps=4", "eval.every=0", *overrides))
    assert (outcome.ended, outcome.version) == ("steps", 4)
    assert all(0 < step["publish/bytes"] <= 1.1 * ADAPTER_BYTES for step in record.steps)
    gaps = [step["mismatch/logprob_gap_max"] for step in record.steps if "mismatch/logprob_gap_max" in step]
    assert len(gaps) == 4 or "buffer.kind=none" not in overrides
    assert max(gaps) < 1e-4


def test_run_with_adapters_resumes_from_a_directory_peft_loads(tmp_path: Path):
    config = tiny_config(tmp_path, *LORA, "run.steps=2", "eval.every=0", "buffer.kind=none")
    run(config)
    newest = checkpoint_folder.latest(Path(config.run.dir) / "tiny" / "checkpoints")
    assert newest is not None
    base = AutoModelForCausalLM.from_pretrained(config.model.path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded = peft.PeftModel.from_pretrained(base, newest / "learner")
        alone = peft.AutoPeftModelForCausalLM.from_pretrained(newest / "learner")
    moved = [p for name, p in loaded.named_parameters() if "lora_B" in name]
    assert moved
    assert any(p.abs().max() > 0 for p in moved)
    ids = torch.arange(8)[None]
    torch.testing.assert_close(alone(input_ids=ids).logits, loaded(input_ids=ids).logits)
    outcome, record = run(tiny_config(tmp_path, *LORA, "run.steps=4", "eval.every=0", "buffer.kind=none"), resume=True)
    assert (outcome.ended, outcome.steps, outcome.version) == ("steps", 4, 4)
    assert record.steps[0]["mismatch/logprob_gap_max"] < 1e-4


def test_dropout_is_mentioned_at_the_start(tmp_path: Path):
    _, record = run(tiny_config(tmp_path, *LORA, "adapters.dropout=0.2", "run.steps=1", "eval.every=0"))
    assert any("adapters.dropout = 0.2" in event for event in record.events)
