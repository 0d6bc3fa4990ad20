"""What a whole run writes to metrics.jsonl is explained in docs/reference/metrics.md."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.e2e.test_runs import run
from tests.e2e.tiny import tiny_config

from corrente.observe.metric_catalogue import find_metric

pytestmark = pytest.mark.slow


def test_every_number_a_run_writes_is_on_the_page(tmp_path: Path):
    config = tiny_config(
        tmp_path,
        "run.steps=4",
        "eval.every=2",
        "eval.samples=2",
        "algo.beta=0.01",
        "algo.num_iterations=2",
        "staleness.mask=1",
        "staleness.correct=mis",
    )
    _, record = run(config)
    written = set().union(*record.steps, *record.evals) - {"step"}
    expected = {"lag0/ess", "ratio/ess", "mismatch_clean/kl_k3", "lag/withheld_fraction", "kl/reference", "eval/pass@1"}
    assert expected <= written
    assert not [name for name in sorted(written) if find_metric(name) is None]
