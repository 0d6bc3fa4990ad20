"""Cutting a step into micro-batches: nothing lost, nothing twice, groups together, budget kept."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from corrente.data.types import Row
from corrente.errors import AlignmentError, DivergedError
from corrente.learner.packing import as_tree, padded_tokens, plan_packs
from corrente.testing import samples


def _row(group: int, tokens: list[int], trained: int = 1, **changes) -> Row:
    """The last ``trained`` tokens are trained on."""
    fields = {"versions": 3, "advantages": group + 1, **changes}
    return samples.row(group=group, tokens=tokens, prompt_tokens=len(tokens) - trained, **fields)


def _plan(rows: list[Row], budget: int):
    return plan_packs(rows, weights_R=np.arange(1, len(rows) + 1, dtype=np.float64), version=4, budget=budget)


@st.composite
def _rows(draw) -> list[Row]:
    token = st.integers(0, 2)
    rows = []
    for group in range(draw(st.integers(1, 4))):
        prompt = draw(st.lists(token, min_size=1, max_size=6))
        for _ in range(draw(st.integers(1, 4))):
            completion = draw(st.lists(token, min_size=1, max_size=6))
            rows.append(_row(group, prompt + completion, len(completion)))
    return rows


@given(_rows(), st.integers(1, 40))
def test_plan_keeps_every_trained_token_once(rows, budget):
    packs = _plan(rows, budget)
    got = sorted(
        (
            *pack.contexts[pack.row_K[k]][: pack.at_K[k] + 1].tolist(),
            -1,
            int(pack.targets_K[k]),
            float(pack.weights_K[k]),
        )
        for pack in packs
        for k in range(len(pack.targets_K))
    )
    want = sorted(
        (*row.tokens[:at].tolist(), -1, int(row.tokens[at]), float(weight))
        for weight, row in enumerate(rows, 1)
        for at in np.flatnonzero(row.loss_mask)
    )
    assert got == want


@given(_rows(), st.integers(1, 40))
def test_plan_keeps_the_budget_except_for_a_single_long_row(rows, budget):
    for pack in _plan(rows, budget):
        assert as_tree(pack).tokens.size <= budget or len(pack.contexts) == 1


@given(_rows(), st.integers(1, 40))
def test_plan_splits_a_group_only_when_it_does_not_fit(rows, budget):
    where: dict[float, set[int]] = {}
    for number, pack in enumerate(_plan(rows, budget)):
        for advantage in pack.advantages_K:
            where.setdefault(float(advantage), set()).add(number)
    for group, packs in where.items():
        alone = _plan([row for row in rows if row.group == group - 1], 10_000)
        assert len(packs) == 1 or as_tree(alone[0]).tokens.size > budget


def test_plan_aligns_what_was_recorded():
    row = _row(0, [5, 6, 7, 8], trained=2)
    (pack,) = _plan([row], 100)
    assert pack.targets_K.tolist() == [7, 8]
    assert pack.at_K.tolist() == [1, 2]
    assert pack.contexts[0].tolist() == [5, 6, 7]
    assert pack.lags_K.tolist() == [1, 1]
    assert pack.behaviour_K.tolist() == [-0.5, -0.5]


def test_plan_refuses_a_token_nothing_predicts():
    with pytest.raises(AlignmentError, match="first token"):
        _plan([_row(0, [5, 6], trained=2)], 100)


def test_plan_refuses_a_row_without_trained_tokens():
    with pytest.raises(AlignmentError, match="no trained token"):
        _plan([_row(0, [5, 6], trained=0)], 100)


@pytest.mark.parametrize("name", ["logprobs", "advantages"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_plan_refuses_values_that_are_not_finite_where_trained(name, bad):
    row = _row(0, [5, 6, 7], **{name: np.array([0, 0, bad], np.float32)})
    with pytest.raises(DivergedError, match=name):
        _plan([row], 100)


@pytest.mark.parametrize("name", ["logprobs", "advantages"])
def test_plan_ignores_values_that_are_not_finite_elsewhere(name):
    row = _row(0, [5, 6, 7], **{name: np.array([np.nan, np.inf, 1], np.float32)})
    (pack,) = _plan([row], 100)
    assert np.isfinite(pack.behaviour_K).all()
    assert np.isfinite(pack.advantages_K).all()


def test_padded_tokens_counts_rows_times_longest():
    assert padded_tokens([_row(0, [1, 2, 3]), _row(0, [1, 2, 3, 4, 5])]) == 10
    assert padded_tokens([]) == 0
