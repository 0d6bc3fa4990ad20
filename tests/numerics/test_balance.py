"""The load-balancing loss: transformers' own number on one padded batch, and the same gradient however a step is cut."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.numerics.sampled_steps import LONG, PROMPTS, mixtures, policy_of, serve_mixture, step_of, without_experts
from tests.numerics.tiny_engine import tiny

from corrente import config as c
from corrente.data.types import Batch
from corrente.errors import ConfigError
from corrente.learner.balance import LoadBalance
from corrente.learner.core import TorchLearner
from corrente.learner.packing import as_rows, plan_packs


def sampled_step(kind: str) -> tuple[Batch, Any]:
    served, model, _ = serve_mixture(kind)
    return step_of(LONG, [(prompt, served.run([prompt] * 3, LONG)) for prompt in PROMPTS]), model


def losses(model: Any, step: Batch, *, budget: int, coef: float = 1.0) -> tuple[float, list[torch.Tensor]]:
    """The loss of a step and its gradient at each router."""
    learner = policy_of(model, LONG)
    learner.model.requires_grad_(True)
    balance = LoadBalance(learner.model, coef=coef)
    packs = plan_packs(step.rows, weights_R=np.ones(len(step.rows)), version=0, budget=budget)
    assert (len(packs) > 1) == (budget < 1000)
    balance.survey(packs, lambda pack: learner(pack, router_logits=True))
    total = 0.0
    for pack in packs:
        loss = balance.loss(learner(pack, router_logits=True))
        loss.backward()
        total += float(loss.detach())
    return total, [layer.mlp.gate.weight.grad for layer in learner.model.model.layers]


@mixtures
def test_loss_is_that_of_transformers_on_one_padded_batch(kind: str):
    step, model = sampled_step(kind)
    (pack,) = plan_packs(step.rows, weights_R=np.ones(len(step.rows)), version=0, budget=10_000)
    padded = as_rows(pack)
    with torch.no_grad():
        out = model(
            input_ids=torch.from_numpy(padded.tokens).long(),
            attention_mask=torch.from_numpy(np.asarray(padded.mask)).long(),
            output_router_logits=True,
        )
    count, k = (
        (model.config.num_local_experts if kind == "mixtral" else model.config.num_experts),
        2 + (kind != "mixtral"),
    )
    theirs = sys.modules[type(model).__module__].load_balancing_loss_func
    want = theirs(out.router_logits, count, k, torch.from_numpy(np.asarray(padded.mask)).long())
    assert losses(model, without_experts(step), budget=10_000)[0] == pytest.approx(float(want), rel=1e-5)
    assert float(out.aux_loss) == pytest.approx(float(want))


@mixtures
def test_gradient_does_not_depend_on_the_cut_into_micro_batches(kind: str):
    step, model = sampled_step(kind)
    whole, gradients = losses(model, step, budget=10_000)
    cut, parts = losses(model, step, budget=18)
    assert cut == pytest.approx(whole, rel=1e-5)
    for one, other in zip(gradients, parts, strict=True):
        assert one.abs().max() > 0
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_step_of_the_learner_adds_it_to_its_loss(tmp_path: Path):
    step, model = sampled_step("mixtral")
    model.save_pretrained(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    reports = []
    for coef in (0.0, 0.5):
        config = c.RunConfig(
            model=c.Model(path=str(tmp_path)),
            sampling=LONG,
            learner=c.LearnerConfig(router_aux_loss_coef=coef, micro_batch_tokens=20),
        )
        reports.append(TorchLearner(config).step(step))
    plain, balanced = reports
    assert "train/router_aux_loss" not in plain
    assert balanced["train/router_aux_loss"] == pytest.approx(losses(model, step, budget=10_000, coef=0.5)[0], rel=1e-4)
    assert balanced["train/loss"] == pytest.approx(plain["train/loss"] + balanced["train/router_aux_loss"], rel=1e-4)
    assert balanced["mismatch/logprob_gap_max"] < 3e-5


def test_model_without_routers_is_refused():
    with pytest.raises(ConfigError, match=r"learner\.router_aux_loss_coef = 0\.01: it is no mixture"):
        LoadBalance(tiny("llama")[1], coef=0.01)
