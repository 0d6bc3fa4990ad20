"""Objectives and corrections through the real learner: the gradient of a step does not depend on how it is cut or padded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from corrente import config as c
from corrente.algo import checks
from corrente.config import RunConfig, Staleness
from corrente.config.load import parse_config
from corrente.data.types import Batch
from corrente.learner.core import TorchLearner
from corrente.learner.packing import plan_packs

OF_KIND: dict[str, dict[str, Any]] = {
    "gspo": {"epsilon": 0.05, "epsilon_high": 0.06},
    "luspo": {"epsilon": 0.05, "epsilon_high": 0.06},
}
GRPO: dict[str, Any] = {"objective": {"kind": "grpo"}}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    **{
        name: ({"objective": {"kind": name, **OF_KIND.get(name, {})}}, {})
        for name in ("gspo", "gmpo", "luspo", "topr", "kimi_k2", "vespo")
    },
    "kl in the reward": ({"beta": 0.3, "kl_in": "reward"}, {}),
    "corrected kl": ({"beta": 0.3, "use_bias_correction_kl": True}, {}),
    "entropy bonus": ({"entropy_coef": 0.2}, {}),
    "high entropy": ({"top_entropy_quantile": 0.4, "entropy_coef": 0.2}, {}),
    "interpolated": ({"proximal": "interpolate"}, {"correct": "tis"}),
    "sequence mask, token weight": ({}, {"band": "geometric", "band_low": 0.3, "band_high": 3.0, "correct": "tis"}),
    "masked, effective": ({"objective": {"kind": "bnpo"}}, {"correct": "mis", "correct_cap": 1.3}),
    "masked, effective, of sequences": (
        {**GRPO, "denominator": "effective"},
        {"correct": "icepop", "correct_cap": 1.3, "correct_floor": 0.6},
    ),
    "masked, effective, of sums": ({"objective": {"kind": "topr"}, "denominator": "effective"}, {"veto": 0.45}),
    "normalised": ({}, {"correct": "tis", "normalise": True, "decay": 0.9}),
    "everything": (
        {**GRPO, "denominator": "effective", "beta": 0.1, "entropy_coef": 0.1, "top_entropy_quantile": 0.8},
        {"veto": 1e-3, "off_policy_mask_threshold": 0.8, "correct": "icepop", "correct_floor": 0.2, "normalise": True},
    ),
}


def _config(path: Path, algo: dict[str, Any], staleness: dict[str, Any], **learner: Any) -> RunConfig:
    config = RunConfig(
        model=c.Model(path=str(path)),
        learner=c.LearnerConfig(**({"lr": 1e-2} | learner)),
        algo=parse_config({"algo": algo}).algo,
        staleness=Staleness(**staleness),
    )
    checks.check(config)
    return config


def _gradient(core: TorchLearner, batch: Batch, *, budget: int) -> tuple[dict[str, torch.Tensor], int]:
    packs = plan_packs(batch.rows, weights_R=core.objective.row_weights(batch), version=batch.version, budget=budget)
    core.gradient.accumulate(packs, core.gradient.survey(packs), fresh=True)
    parameters = dict(core.model.named_parameters())
    found = {name: p.grad.clone() for name, p in parameters.items() if p.grad is not None}
    core.backend.discard()
    return found, len(packs)


def _nearer(batch: Batch, own: dict[int, np.ndarray]) -> Batch:
    """Behaviour log-probs a little off the model's own: ratios from about 0.4 to 2.5, so that some are cut and some are not."""
    rng, rows = np.random.default_rng(1), []
    for number, row in enumerate(batch.rows):
        logprobs = np.zeros(len(row.tokens), np.float32)
        logprobs[row.loss_mask] = own[number] + rng.normal(0, 0.3, len(own[number]))
        rows.append(msgspec.structs.replace(row, logprobs=logprobs))
    return msgspec.structs.replace(batch, rows=tuple(rows))


@pytest.fixture
def stale(build_model, build_batch, plain_logprobs):
    batch = build_batch(4, 3)
    own = plain_logprobs(build_model(dtype=torch.float32), batch.rows)
    return _nearer(batch, {number: values.detach().numpy() for number, values in enumerate(own)})


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_gradient_is_the_same_for_every_split_and_padding(case, model_dir, stale):
    core = TorchLearner(_config(model_dir(), *CASES[case]))
    want, _ = _gradient(core, stale, budget=10_000)
    scale = max(float(g.abs().max()) for g in want.values())
    assert scale > 1e-5
    for folds, budget in ((True, 40), (False, 10_000), (False, 1)):
        core.policy.traits = core.policy.traits._replace(prefix_tree=folds)
        got, packs = _gradient(core, stale, budget=budget)
        assert packs == 1 if budget == 10_000 else packs > 1
        assert got.keys() == want.keys()
        for name, gradient in got.items():
            torch.testing.assert_close(gradient, want[name], atol=2e-5 * scale, rtol=1e-4)


def test_corrections_see_nothing_that_is_masked(model_dir, stale):
    """NaN and inf where nothing is trained change neither weights nor means over the step."""
    algo, staleness = CASES["everything"]

    def poisoned(row, value: float):
        holes = {name: np.where(row.loss_mask, getattr(row, name), value) for name in ("logprobs", "advantages")}
        return msgspec.structs.replace(row, **{name: array.astype(np.float32) for name, array in holes.items()})

    reports = []
    for value in (0.0, np.nan, np.inf):
        core = TorchLearner(_config(model_dir(), algo, staleness))
        dirty = msgspec.structs.replace(stale, rows=tuple(poisoned(row, value) for row in stale.rows))
        reports.append(core.step(dirty))
        reports[-1].pop("learner/busy_s")
    assert reports[0] == reports[1] == reports[2]
    assert 0 < reports[0]["train/rejected_fraction"] < 1


def test_rejected_tokens_are_counted(model_dir, stale):
    core = TorchLearner(_config(model_dir(), {}, {"correct": "mis", "correct_cap": 1.2}))
    report = core.step(stale)
    assert report["train/rejected_fraction"] == report["train/clip_fraction"] == report["train/clip_fraction_high"]
    assert 0.1 < report["train/rejected_fraction"] < 0.9


def test_several_updates_from_one_batch(model_dir, stale):
    """The first is that of a single one; the proximal policy stays that of the beginning, so later ones are clipped."""
    settings = {"proximal": "recompute", "objective": {"epsilon": 0.01, "epsilon_high": 0.01}}
    once, often = (
        TorchLearner(_config(model_dir(), settings | {"num_iterations": n}, {"correct": "tis"}, max_grad_norm=0.0))
        for n in (1, 4)
    )
    first, report = once.step(stale), often.step(stale)
    assert {k: report[k] for k in first if k != "learner/busy_s"} == {
        k: pytest.approx(v, rel=1e-5) for k, v in first.items() if k != "learner/busy_s"
    }
    assert "train/last_clip_fraction" not in first
    assert report["train/last_clip_fraction"] > first["train/clip_fraction"]
    moved = [float((core.tensors()["model.norm.weight"] - 1).abs().sum()) for core in (once, often)]
    assert moved[0] != moved[1]


def test_entropy_bonus_raises_entropy(model_dir, stale):
    flat = msgspec.structs.replace(
        stale, rows=tuple(msgspec.structs.replace(row, advantages=np.zeros_like(row.advantages)) for row in stale.rows)
    )
    core = TorchLearner(_config(model_dir(), {"entropy_coef": 1.0}, {}))
    entropies = [core.step(flat)["train/entropy"] for _ in range(4)]
    assert entropies == sorted(entropies)
    assert entropies[-1] > entropies[0] + 0.01


@pytest.mark.parametrize("kind", ["kimi_k15", "kimi_k2", "dro", "topr", "gspo"])
@pytest.mark.parametrize(
    "staleness",
    [
        {"veto": 1e-3},
        {"band": "geometric", "band_low": 0.3, "band_high": 3.0},
        {"band": "k2", "band_low": 0.0, "band_high": 3.0},
        {"correct": "mis"},
    ],
    ids=["veto", "geometric", "k2", "mis"],
)
def test_step_with_logprobs_that_cannot_be_is_one_without_their_tokens(kind: str, staleness: dict, model_dir, stale):
    """A log-prob is recorded that lies 3e38 from the policy's: the step is finite, and moves the weights."""
    for least in (3e38, -3e38, -1e5):
        logprobs = stale.rows[0].logprobs.copy()
        logprobs[np.flatnonzero(stale.rows[0].loss_mask)[0]] = least
        odd = msgspec.structs.replace(
            stale, rows=(msgspec.structs.replace(stale.rows[0], logprobs=logprobs), *stale.rows[1:])
        )
        core = TorchLearner(_config(model_dir(), {"objective": {"kind": kind, **OF_KIND.get(kind, {})}}, staleness))
        report = core.step(odd)
        assert least < 0 or report["train/rejected_fraction"] > 0
        assert 0 < report["train/grad_norm"] < np.inf
        assert all(torch.isfinite(parameter).all() for parameter in core.model.parameters())
