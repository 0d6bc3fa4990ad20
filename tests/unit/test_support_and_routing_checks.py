"""Which settings go with kept supports and kept experts, decided before a model is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.refusals import refusal

from corrente.algo import checks as algo_checks
from corrente.config import Algo, LearnerConfig, Model, RunConfig, Staleness
from corrente.data.types import Sampling
from corrente.entrypoints.checks import check_config
from corrente.models import cache as model_cache

CUTS = [{"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}]


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_truncated_sampling_needs_its_support(cut: dict[str, Any]):
    assert refusal(algo_checks.check, RunConfig(sampling=Sampling(**cut))) == ""
    refused = refusal(algo_checks.check, RunConfig(sampling=Sampling(keep_support=False, **cut)))
    assert refused.startswith("sampling.keep_support = false: ")
    assert " must be true" in refused


def test_whole_sampling_needs_no_support():
    assert refusal(algo_checks.check, RunConfig(sampling=Sampling(keep_support=False))) == ""


def test_truncated_sampling_without_its_support_goes_with_a_weight_beside_a_recomputed_proximal_policy():
    weighted = RunConfig(sampling=Sampling(keep_support=False, top_p=0.9), staleness=Staleness(correct="tis"))
    assert refusal(algo_checks.check, weighted) == ""
    interpolated = msgspec.structs.replace(weighted, algo=Algo(proximal="interpolate"))
    assert "keep_support" in refusal(algo_checks.check, interpolated)


def folder(path: Path, **config: Any) -> Path:
    for name in ("model.safetensors", "tokenizer.json"):
        (path / name).write_bytes(b"")
    (path / "config.json").write_text(json.dumps({"model_type": "x", **config}))
    return path


@pytest.mark.parametrize(
    ("config", "count"),
    [
        ({}, 0),
        ({"num_experts": 8}, 8),
        ({"num_local_experts": 4}, 4),
        ({"text_config": {"n_routed_experts": 64}}, 64),
        ({"num_experts": None}, 0),
    ],
)
def test_experts_are_counted_from_the_configuration(config: dict[str, Any], count: int, tmp_path: Path):
    assert model_cache.experts(folder(tmp_path, **config)) == count


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"keep_routing": True}, "model.keep_routing = true"),
        ({"coef": 0.01}, "learner.router_aux_loss_coef = 0.01"),
    ],
)
def test_settings_of_mixtures_of_experts_are_refused_for_other_models(
    sections: dict[str, Any], key: str, tmp_path: Path
):
    model = Model(path=str(folder(tmp_path)), keep_routing=sections.get("keep_routing"))
    config = RunConfig(model=model, learner=LearnerConfig(router_aux_loss_coef=sections.get("coef", 0.0)))
    refused = refusal(check_config, config)
    assert refused.startswith(f"{key}: ")
    assert "is no mixture of experts" in refused
    left_out = RunConfig(model=Model(path=model.path, keep_routing=False))
    assert refusal(check_config, left_out) == ""
