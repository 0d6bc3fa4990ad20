"""Losses and advantages equal TRL's own on the same arrays, to 1e-6. TRL runs in an environment of its own.

``make test-trl`` makes it, names it in CORRENTE_TRL_PYTHON and runs these tests; without the variable they are skipped.
Every case runs in one process, for importing trl takes long.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from corrente.algo import checks, divergence, estimators, gdpo
from corrente.algo.base import Trained
from corrente.algo.losses import PolicyObjective
from corrente.config import Algo, RunConfig, Staleness
from corrente.data.types import Batch, Row, Sampling

PYTHON = os.environ.get("CORRENTE_TRL_PYTHON", "")
pytestmark = [
    pytest.mark.trl,
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON, reason="CORRENTE_TRL_PYTHON does not name an interpreter that has trl"),
]

ROWS, LONGEST, BUDGET = 6, 9, 16
BETAS = (0.0, 0.3, 0.5, 1.0)
LOGITS = {
    name: np.random.default_rng(seed).normal(size=(5, 7)).tolist() for seed, name in enumerate(("student", "teacher"))
}
LENGTHS = (9, 1, 4, 7, 9, 2)

# name: (ours: algo, ours: staleness, TRL's settings, what else TRL is given)
LOSSES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], str]] = {
    **{
        name: ({"loss": name, "delta": None}, {}, {"loss_type": name}, "old")
        for name in ("grpo", "bnpo", "dr_grpo", "dapo", "sapo", "vespo")
    },
    "two-sided": ({"loss": "grpo", "delta": 1.5}, {}, {"loss_type": "grpo", "delta": 1.5}, "old"),
    "asymmetric": (
        {"loss": "dapo", "epsilon": 0.1, "epsilon_high": 0.4, "delta": None},
        {},
        {"loss_type": "dapo", "epsilon": 0.1, "epsilon_high": 0.4},
        "old",
    ),
    "gspo": (
        {"loss": "gspo", "epsilon": 3e-2, "epsilon_high": 4e-2, "delta": None},
        {},
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-2, "epsilon_high": 4e-2},
        "old",
    ),
    "grpo of sequences": (
        {"loss": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.05, "epsilon_high": 0.06, "delta": None},
        {},
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.05, "epsilon_high": 0.06},
        "old",
    ),
    "luspo": (
        {
            "loss": "luspo",
            "importance_sampling_level": "sequence",
            "epsilon": 0.05,
            "epsilon_high": 0.06,
            "delta": None,
        },
        {},
        {"loss_type": "luspo", "importance_sampling_level": "sequence", "epsilon": 0.05, "epsilon_high": 0.06},
        "old",
    ),
    "cispo": ({"loss": "cispo", "epsilon_high": 1.3}, {}, {"loss_type": "cispo", "epsilon_high": 1.3}, "old"),
    "kl": ({"loss": "dapo", "beta": 0.2, "delta": None}, {}, {"beta": 0.2, "use_bias_correction_kl": False}, "old"),
    "corrected kl": (
        {"loss": "dapo", "beta": 0.2, "use_bias_correction_kl": True, "delta": None},
        {},
        {"beta": 0.2, "use_bias_correction_kl": True},
        "old",
    ),
    "entropy bonus": (
        {"loss": "grpo", "entropy_coef": 0.3, "delta": None},
        {},
        {"loss_type": "grpo", "entropy_coef": 0.3},
        "old",
    ),
    "high entropy": (
        {"loss": "grpo", "top_entropy_quantile": 0.3, "entropy_coef": 0.3, "delta": None},
        {},
        {"loss_type": "grpo", "top_entropy_quantile": 0.3, "entropy_coef": 0.3},
        "old",
    ),
    "off-policy mask": (
        {"loss": "dapo", "delta": None},
        {"off_policy_mask_threshold": 0.05},
        {"off_policy_mask_threshold": 0.05},
        "old",
    ),
    **{
        f"{mode} {level}": (
            {"loss": "dapo", "delta": None},
            {"correct": ours, "correct_level": level, "correct_cap": 1.4, "correct_floor": floor},
            {"loss_type": "dapo"},
            "weights",
        )
        for mode, ours, floor in (("truncate", "tis", 0.7), ("mask", "icepop", 0.7))
        for level in ("token", "sequence")
    },
}


def _arrays(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shape = (ROWS, LONGEST)
    logprobs = -rng.exponential(1.0, shape)
    return {
        "mask": (np.arange(LONGEST)[None] < np.array(LENGTHS)[:, None]).astype(float),
        "logprobs": logprobs,
        "behaviour": logprobs + 0.4 * rng.standard_normal(shape),
        "reference": logprobs + 0.3 * rng.standard_normal(shape),
        "entropies": rng.exponential(1.0, shape),
        "advantages": rng.standard_normal(ROWS),
    }


def _case(name: str) -> dict[str, Any]:
    """TRL's side. Where there are importance weights they are made here, by TRL's formula, from TRL's old log-probs."""
    _, staleness, settings, given = LOSSES[name]
    arrays = _arrays()
    mask = arrays["mask"]
    out = {key: arrays[key] for key in ("mask", "logprobs", "entropies", "advantages")}
    if given == "old":
        out["old_per_token_logps"] = arrays["behaviour"]
    else:
        apart = (arrays["logprobs"] - arrays["behaviour"]) * mask
        ratio = np.exp(apart.sum(-1, keepdims=True) if staleness["correct_level"] == "sequence" else apart)
        low, high = staleness["correct_floor"], staleness["correct_cap"]
        inside = (ratio >= low) & (ratio <= high)
        weight = np.clip(ratio, low, high) if staleness["correct"] == "tis" else np.where(inside, ratio, 0.0)
        out["importance_sampling_ratio"] = weight
    if settings.get("beta"):
        out["ref_per_token_logps"] = arrays["reference"]
    settings = {"max_completion_length": BUDGET, "epsilon_high": 0.28} | settings
    return {"kind": "loss", "settings": settings, "arrays": {key: value.tolist() for key, value in out.items()}}


def _ours(name: str) -> tuple[float, np.ndarray, np.ndarray]:
    algo, staleness, _, _ = LOSSES[name]
    arrays = _arrays()
    mask = arrays["mask"].astype(bool)
    config = RunConfig(algo=Algo(**algo), staleness=Staleness(**staleness), sampling=Sampling(max_tokens=BUDGET))
    checks.check(config)
    objective = PolicyObjective(config)
    flat = {key: torch.from_numpy(arrays[key][mask]) for key in ("logprobs", "behaviour", "reference", "entropies")}
    flat["logprobs"].requires_grad_()
    flat["entropies"].requires_grad_()
    counts = mask.sum(1)
    weights = objective.row_weights(_batch(mask))
    known = {
        "behaviour_K": flat["behaviour"],
        "advantages_K": torch.from_numpy(np.repeat(arrays["advantages"], counts)),
        "weights_K": torch.from_numpy(np.repeat(weights, counts)),
        "row_K": torch.from_numpy(np.repeat(np.arange(ROWS), counts)),
        "entropy_K": flat["entropies"],
        "reference_K": flat["reference"] if objective.needs_reference else None,
    }
    constants = _surveyed(objective, flat["logprobs"], known) if objective.needs_survey else None
    loss = objective(Trained(logprobs_K=flat["logprobs"], **known), constants=constants).total
    gradients = torch.autograd.grad(loss, [flat["logprobs"], flat["entropies"]], allow_unused=True)
    filled = []
    for gradient in gradients:
        full = np.zeros(mask.shape)
        if gradient is not None:
            full[mask] = gradient.numpy()
        filled.append(full)
    return loss.item(), filled[0], filled[1]


def _surveyed(objective: PolicyObjective, logprobs: torch.Tensor, known: dict[str, Any]) -> Any:
    with torch.no_grad():
        return objective.survey([Trained(logprobs_K=logprobs, **known)])[0]


def _batch(mask: np.ndarray) -> Batch:
    rows = [
        Row(
            group=0,
            tokens=np.zeros(count + 1, np.int32),
            loss_mask=np.arange(count + 1) > 0,
            logprobs=np.zeros(count + 1, np.float32),
            versions=np.zeros(count + 1, np.int32),
            advantages=np.zeros(count + 1, np.float32),
        )
        for count in mask.sum(1)
    ]
    return Batch(step=0, version=0, rows=tuple(rows), sequences=len(rows), tokens=int(mask.sum()))


SCORES = [[1.0, 0.2], [0.0, 0.9], [1.0, 0.4], [0.0, 0.1], [0.5, 0.5], [0.25, 0.0], [1.0, 1.0], [0.0, 0.3]]
ADVANTAGES = {
    "group": {"scale_rewards": "group", "aggregation": "sum_then_normalize"},
    "batch": {"scale_rewards": "batch", "aggregation": "sum_then_normalize"},
    "none": {"scale_rewards": "none", "aggregation": "sum_then_normalize"},
    "gdpo": {"scale_rewards": "group", "aggregation": "normalize_then_sum"},
}
WEIGHTS = [1.0, 0.5]


@pytest.fixture(scope="module")
def theirs() -> dict[str, Any]:
    cases = {name: _case(name) for name in LOSSES} | {
        name: {"kind": "advantages", "scores": SCORES, "weights": WEIGHTS, "group_size": 4} | settings
        for name, settings in ADVANTAGES.items()
    }
    cases |= {f"jsd {beta}": {"kind": "divergence", "beta": beta, "temperature": 0.8, **LOGITS} for beta in BETAS}
    script = Path(__file__).with_name("trl_losses.py")
    done = subprocess.run(
        [PYTHON, str(script)], input=json.dumps(list(cases.values())), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(zip(cases, json.loads(done.stdout), strict=True))


@pytest.mark.parametrize("name", LOSSES)
def test_loss_and_gradient_equal_trl(name: str, theirs: dict[str, Any]):
    loss, gradient, entropy_gradient = _ours(name)
    want = theirs[name]
    assert np.abs(np.array(want["gradient"])).max() > 1e-4
    np.testing.assert_allclose(gradient, want["gradient"], atol=1e-6, rtol=1e-6)
    np.testing.assert_allclose(entropy_gradient, want["entropy_gradient"], atol=1e-6, rtol=1e-6)
    if LOSSES[name][3] == "old":
        assert loss == pytest.approx(want["loss"], abs=1e-6)


@pytest.mark.parametrize("beta", BETAS)
def test_divergence_over_all_tokens_equals_trl(beta: float, theirs: dict[str, Any]):
    logits = torch.tensor(LOGITS["student"], dtype=torch.float64).requires_grad_()
    teacher = torch.tensor(LOGITS["teacher"], dtype=torch.float64)
    student = (logits / 0.8).log_softmax(-1)
    got = divergence.jsd(student, (teacher / 0.8).log_softmax(-1), beta=beta)
    want = theirs[f"jsd {beta}"]
    np.testing.assert_allclose(got.detach(), want["value"], atol=1e-6, rtol=1e-6)
    (gradient,) = torch.autograd.grad(got.sum(), logits)
    assert np.abs(np.array(want["gradient"])).max() > 1e-3
    np.testing.assert_allclose(gradient, want["gradient"], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_advantages_equal_trl(name: str, theirs: dict[str, Any]):
    groups = [np.array(SCORES[:4]), np.array(SCORES[4:])]
    if name == "gdpo":
        got = gdpo.gdpo(groups, weights=WEIGHTS, tolerance=1e-6)
    else:
        rewards, lengths = [group @ WEIGHTS for group in groups], [np.ones(4, np.int64)] * 2
        got = estimators.ESTIMATORS["grpo"](rewards, lengths, name, 1e-6)
    np.testing.assert_allclose(np.concatenate(got), theirs[name], atol=1e-6)
