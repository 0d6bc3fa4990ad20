"""Every metric is on the page, with the reduction it is really recorded with."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from tests.unit.test_learner_metrics import trace

from corrente.data.reductions import Accumulator
from corrente.learner import metrics
from corrente.observe.catalogue import AREAS, find

ROOT = Path(__file__).parents[2]
INTERNAL = ("ratio/square",)
"""Recorded to derive another from, and not reported."""


def test_page_is_current():
    path = ROOT / "docs" / "reference" / "generate_metrics.py"
    spec = importlib.util.spec_from_file_location("generate_metrics", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    current = (ROOT / "docs" / "reference" / "metrics.md").read_text(encoding="utf-8")
    assert current == module.render(), "run python docs/reference/generate_metrics.py"


def test_no_metric_is_explained_twice():
    names = [row.name for _, rows in AREAS for row in rows]
    assert len(names) == len(set(names))


def test_page_says_how_the_learner_combines_each_metric():
    sums = Accumulator()
    metrics.record_tokens(sums, trace())
    for name, how in sums.reductions().items():
        if name in INTERNAL or name.endswith("/ratio_square"):
            continue
        row = find(name)
        assert row is not None, f"{name} is not in observe/catalogue.py"
        assert row.combined == how, name


def test_every_number_of_the_learner_is_on_the_page():
    sums = Accumulator()
    metrics.record_tokens(sums, trace())
    missing = [name for name in metrics.step_report(sums) if find(name) is None]
    assert not missing


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("lag3-4/ess", "lag<b>/ess"),
        ("lag5+/tokens", "lag<b>/tokens"),
        ("lag6/tokens", None),
        ("reward/mean", "reward/mean"),
        ("reward/exact_line", "reward/<function>"),
        ("train/looss", None),
    ],
)
def test_find_takes_the_exact_row_before_a_pattern(name: str, row: str | None):
    found = find(name)
    assert (found and found.name) == row
