"""Whole runs that keep supports and experts: over processes, swaps and resumes, the learner sees what the engine drew from."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from tests.e2e.test_runs import run
from tests.e2e.tiny import tiny_config, write_model
from transformers import AutoConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

pytestmark = pytest.mark.slow
CUT = ("sampling.top_p=0.9", "sampling.top_k=8", "sampling.temperature=0.8", "sampling.min_p=0.01")


def write_mixture(folder: Path) -> Path:
    """The tiny model's tokenizer and sizes, with 8 experts of which a token is sent to 2."""
    write_model(folder)
    plain = AutoConfig.from_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        **{key: getattr(plain, key) for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")},
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        moe_intermediate_size=16,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
        tie_word_embeddings=True,
        initializer_range=0.3,
    )
    for name in ("config.json", "model.safetensors"):
        (folder / name).unlink()
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "overrides",
    [["runtime.kind=inline"], ["runtime.kind=procs", "runtime.placement=shared", "inflight.kind=resume"]],
    ids=str,
)
def test_run_with_truncated_sampling_has_ratios_of_one_where_nothing_lags(tmp_path: Path, overrides: list[str]):
    outcome, record = run(tiny_config(tmp_path, *CUT, *overrides))
    assert (outcome.ended, outcome.counts["failed"]) == ("steps", 0)
    gaps = [step["mismatch/logprob_gap_max"] for step in record.steps if "mismatch/logprob_gap_max" in step]
    assert gaps
    assert gaps[0] < 1e-4


def test_run_without_the_support_shows_the_mass_that_was_cut_off(tmp_path: Path):
    _, record = run(
        tiny_config(
            tmp_path, *CUT, "sampling.keep_support=false", "staleness.correct=tis", "run.steps=1", "eval.every=0"
        )
    )
    assert record.steps[0]["mismatch/logprob_gap_max"] > 0.02


@pytest.mark.parametrize(
    "overrides",
    [["runtime.kind=inline"], ["runtime.kind=procs", "runtime.placement=shared", "adapters.kind=lora"]],
    ids=str,
)
def test_run_of_a_mixture_keeps_its_experts_and_balances_them(tmp_path: Path, overrides: list[str]):
    config = tiny_config(tmp_path)
    shutil.rmtree(config.model.path)
    write_mixture(Path(config.model.path))
    kept = ("model.keep_routing=true", "learner.router_aux_loss_coef=0.01", "learner.lr=0.001")
    outcome, record = run(tiny_config(tmp_path, *kept, *CUT, *overrides))
    assert (outcome.ended, outcome.counts["failed"]) == ("steps", 0)
    assert record.steps[0]["mismatch/logprob_gap_max"] < 1e-4
    assert all(0 < step["train/router_aux_loss"] < 1 for step in record.steps)
