"""A step that several ranks compute, sharded by FSDP2, equals the step of one process: the contracts leave nothing out."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from tests.numerics.ranks import run_ranks
from torch.distributed.tensor import DTensor

from corrente import config as c
from corrente.config import RunConfig
from corrente.data.types import Batch
from corrente.errors import DivergedError
from corrente.learner.core import TorchLearner

pytestmark = pytest.mark.slow


def _share(batch: Batch, rank: int, ranks: int) -> Batch:
    """The groups of one rank; the denominators stay those of the whole step."""
    return msgspec.structs.replace(batch, rows=tuple(row for row in batch.rows if row.group % ranks == rank))


def _steps(rank: int, configs: list[RunConfig], batches: list[Batch], ranks: int) -> Any:
    """Per config, the reports of all steps, and the weights after them."""
    out = []
    for config in configs:
        core = TorchLearner(config)
        reports = [core.step(_share(batch, rank, ranks)) for batch in batches]
        tensors = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in core.tensors().items()}
        out.append((reports, {name: tensor.clone() for name, tensor in tensors.items()}))
    return out


@pytest.mark.parametrize("ranks", [2, 3])
def test_step_of_several_ranks_equals_that_of_one_process(ranks, model_dir, build_batch, tmp_path):
    """With all that depends on the step as a whole: effective denominator, normalised weights, entropy quantile, a reference.
    In one micro-batch a rank, and in one for each row."""
    configs = [
        RunConfig(
            model=c.Model(path=str(model_dir())),
            learner=c.LearnerConfig(lr=1e-2, weight_decay=0.1, max_grad_norm=0.05, micro_batch_tokens=budget),
            algo=c.Algo(
                objective=c.GrpoObjective(),
                denominator="effective",
                beta=0.1,
                entropy_coef=0.1,
                top_entropy_quantile=0.8,
            ),
            staleness=c.Staleness(correct="icepop", correct_cap=3.0, correct_floor=0.2, normalise=True),
        )
        for budget in (10_000, 1)
    ]
    batches = [build_batch(6, 2, seed=seed) for seed in (1, 2)]
    wanted = _steps(0, configs, batches, 1)
    # these depend on which rows lie in one micro-batch
    local = ("learner/busy_s", "train/padded_tokens", "train/distinct_tokens")
    for found in run_ranks(ranks, _steps, tmp_path, configs, batches, ranks):
        for (reports, want), (own_reports, own) in zip(wanted, found, strict=True):
            for report, own_report in zip(reports, own_reports, strict=True):
                assert {k: v for k, v in own_report.items() if k not in local} == {
                    k: pytest.approx(v, rel=1e-3, abs=1e-6) for k, v in report.items() if k not in local
                }
            for name, tensor in want.items():
                torch.testing.assert_close(own[name], tensor, atol=2e-5, rtol=1e-4)


def _diverges(rank: int, config: RunConfig, bad: Batch, good: Batch) -> Any:
    """Whether the bad batch raised and left the weights, and the report of the good one after it."""
    core = TorchLearner(config)
    before = {name: tensor.full_tensor() for name, tensor in core.tensors().items()}
    try:
        core.step(_share(bad, rank, 2))
    except DivergedError:
        raised = True
    else:
        raised = False
    kept = all(torch.equal(before[name], tensor.full_tensor()) for name, tensor in core.tensors().items())
    return raised, kept, core.step(_share(good, rank, 2))


def test_loss_that_diverges_on_one_rank_ends_the_step_on_all(model_dir, build_batch, tmp_path):
    """Neither hangs nor moves a weight, and the next step is computed as if nothing had been."""
    config = RunConfig(
        model=c.Model(path=str(model_dir())),
        learner=c.LearnerConfig(lr=1e-2, micro_batch_tokens=1),
        algo=c.Algo(objective=c.DapoObjective(delta=None)),
    )
    good = build_batch(6, 2, seed=1)
    faulty = [
        msgspec.structs.replace(
            row,
            logprobs=np.where(row.loss_mask, -60, 0).astype(np.float32),
            advantages=np.where(row.loss_mask, -3e38, 0).astype(np.float32),
        )
        if row.group == 2
        else row
        for row in good.rows
    ]
    bad = msgspec.structs.replace(good, rows=tuple(faulty))
    alone = TorchLearner(config)
    with pytest.raises(DivergedError):
        alone.step(bad)
    want = alone.step(good)["train/grad_norm"]
    for raised, kept, report in run_ranks(2, _diverges, tmp_path, config, bad, good):
        assert raised
        assert kept
        assert report["train/grad_norm"] == pytest.approx(want, rel=1e-4)
