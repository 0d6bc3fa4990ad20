"""Numbers of an evaluation, computed by hand and by drawing."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest

from corrente.controller.eval_metrics import eval_metrics, pass_at_k, source_of
from corrente.data.types import Episode, Group
from corrente.observe.eval_table import aligned, eval_table
from corrente.testing import samples


def _episode(reward: float | None, **values: Any) -> Episode:
    """Two tokens of version 3."""
    return samples.episode(versions=(3, 3), reward=reward, **{"scores": {}, **values})


def _group(prompt: str, *rewards: float | None) -> Group:
    return _group_of(prompt, *(_episode(reward) for reward in rewards))


def _group_of(prompt: str, *episodes: Episode) -> Group:
    return samples.group(prompt=samples.prompt(id=prompt), episodes=episodes)


@pytest.mark.parametrize(("n", "c", "k"), [(4, 0, 1), (4, 1, 2), (5, 2, 3), (6, 6, 1), (6, 3, 6), (4, 3, 2)])
def test_pass_at_k_is_the_part_of_all_choices_of_k_samples_with_one_that_passes(n: int, c: int, k: int):
    samples = [True] * c + [False] * (n - c)
    choices = list(itertools.combinations(samples, k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, choices)) / len(choices))


def test_pass_at_k_is_unbiased():
    """The mean over draws of n samples is 1 - (1 - p)^k, also where k < n; the naive 1 - (1 - c/n)^k is not."""
    n, k, p = 5, 3, 0.3
    chances = [math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)]
    expected = 1 - (1 - p) ** k
    assert sum(chance * pass_at_k(n, c, k) for c, chance in enumerate(chances)) == pytest.approx(expected)
    assert sum(chance * (1 - (1 - c / n) ** k) for c, chance in enumerate(chances)) < expected - 0.02


def test_pass_at_k_refuses_what_it_cannot_say():
    for n, c, k in ((3, 1, 4), (3, 4, 1), (3, 1, 0)):
        with pytest.raises(ValueError, match=f"pass@{k} of {n}"):
            pass_at_k(n, c, k)


def test_metrics_by_hand():
    groups = [_group("eval/0", 1.0, 0.0), _group("eval/1", 1.0, 1.0), _group("eval/2", 0.0, 0.0)]
    values = eval_metrics(groups, pass_at=(1, 2))
    assert values["eval/reward"] == pytest.approx(0.5)
    assert values["eval/reward_std"] == pytest.approx(math.sqrt(6 * 0.25 / 5))  # of a sample
    assert values["eval/reward_stderr"] == pytest.approx(0.5 / math.sqrt(3))  # prompt means 0.5, 1, 0
    assert (values["eval/pass@1"], values["eval/pass@2"]) == (pytest.approx(0.5), pytest.approx(2 / 3))
    assert (values["eval/episodes"], values["eval/failed"], values["eval/version"]) == (6, 0, 3)
    assert (values["eval/tokens_mean"], values["eval/truncated_fraction"]) == (2, 0)
    assert not any(name.count("/") > 1 for name in values)


def test_failed_samples_are_counted_and_in_no_mean():
    whole, part = _group("eval/0", 1.0, 1.0), _group("eval/1", 0.0, None)
    lost = _group_of("eval/1", part.episodes[0], _episode(0.7, status="failed"))
    for second in (part, lost):
        values = eval_metrics([whole, second], pass_at=(1, 2))
        assert (values["eval/episodes"], values["eval/failed"]) == (3, 1)
        assert (values["eval/reward"], values["eval/pass@1"]) == (0.5, 0.5)
        assert values["eval/pass@2"] == 1.0  # of the prompt that still has two samples
    assert eval_metrics([]) == {"eval/episodes": 0, "eval/failed": 0}


def test_sources_have_numbers_of_their_own():
    groups = [_group("easy:eval/0", 1.0), _group("easy:eval/1", 0.0), _group("hard:eval/0", 0.0)]
    values = eval_metrics(groups)
    assert values["eval/reward"] == pytest.approx(1 / 3)
    assert (values["eval/easy/reward"], values["eval/hard/reward"], values["eval/easy/pass@1"]) == (0.5, 0.0, 0.5)
    assert source_of("easy:eval/1") == "easy"
    assert source_of("eval/1") == ""


def test_reward_functions_are_told_apart_where_there_are_several():
    one = _episode(1.0, scores={"exact": 1.0, "form": None})
    other = _episode(0.0, scores={"exact": 0.0, "form": 0.5})
    values = eval_metrics([_group_of("eval/0", one, other)])
    assert (values["eval/reward/exact"], values["eval/reward/form"]) == (0.5, 0.5)


def test_table_has_a_row_for_all_and_for_each_source():
    groups = [_group("easy:eval/0", 1.0, 0.0), _group("easy:eval/1", 1.0, 1.0), _group("hard:eval/0", 0.0, 0.0)]
    table = eval_table(eval_metrics(groups, pass_at=(1, 2)))
    assert table[0] == ["prompts", "reward", "std", "pass@1", "pass@2", "tokens", "cut off"]
    assert table[1] == ["all", "0.500 ± 0.289", "0.548", "0.500", "0.667", "2.0", "0%"]
    assert [row[0] for row in table[2:]] == ["easy", "hard"]
    assert table[3][1:4] == ["0.000", "0.000", "0.000"]
    lines = aligned(table)
    assert lines[0].index("std") == lines[1].index("0.548", 20)
    assert aligned(eval_table({"eval/episodes": 0.0}))[1].split() == ["all", "-", "-", "-", "-"]
