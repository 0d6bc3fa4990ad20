"""Functions of the user's as objectives, estimators and filters: found, and refused before a model is loaded."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from corrente.algo import bind, checks
from corrente.algo.advantages import StepRewards
from corrente.algo.grouped import GroupedAlgorithm
from corrente.config.load import load_config
from corrente.errors import ConfigError, PipelineError
from corrente.testing import samples

MINE = """
from typing import Any
import functools

def objective(inputs, *, low: float = 0.5, names: Any = (), note: "str" = ""):
    return inputs

def needs(inputs, low, high=2):
    return inputs

def anything(*inputs, **options):
    return inputs

def nothing():
    return 0

def only_keys(*, inputs):
    return inputs

def halves(step, *, factor: float):
    return [factor * r for r in step.rewards]

def raises(step):
    raise RuntimeError("no such luck")

def filtered(episodes, *, most: int = 3):
    return "too many" if len(episodes) > most else ""

def no_text(episodes):
    return len(episodes)

number = 3
bound = functools.partial(needs, high=1)
"""


def _load(tmp_path: Path, text: str):
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "config.toml").write_text(text)
    return load_config(tmp_path / "config.toml")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[algo.objective]\nkind = "mine.py:absent"', ("algo.objective.kind = ", "has no 'absent'", "objective")),
        ('[algo.objective]\nkind = "mine.py:number"', ("algo.objective.kind = ", "must be callable")),
        ('[algo.objective]\nkind = "no/such.py:f"', ("algo.objective.kind = 'no/such.py:f'", "does not exist")),
        ('[algo.objective]\nkind = "no_such_module:f"', ("no_such_module cannot be imported",)),
        (
            '[algo.objective]\nkind = "mine.py:objective"\nlower = 0.1',
            ("algo.objective.lower = 0.1", "takes no 'lower'", "it takes low, names, note"),
        ),
        (
            '[algo.objective]\nkind = "mine.py:objective"\nlow = "a"',
            ('algo.objective.low = "a"', "takes a number"),
        ),
        ('[algo.objective]\nkind = "mine.py:objective"\nnote = 3', ("algo.objective.note = 3", "takes a text")),
        (
            '[algo.objective]\nkind = "mine.py:needs"\nhigh = 3',
            ("algo.objective.low is missing", "mine.py:needs needs it"),
        ),
        ('[algo.objective]\nkind = "mine.py:nothing"', ("algo.objective.kind = ", "it takes no argument")),
        ('[algo.objective]\nkind = "mine.py:only_keys"', ("algo.objective.kind = ", "it takes no argument")),
        ('[algo.advantage]\nkind = "mine.py:halves"', ("algo.advantage.factor is missing",)),
        (
            '[[filter.rules]]\nkind = "mine.py:filtered"\n[[filter.rules]]\nkind = "mine.py:filtered"\nmost = "a"',
            ('filter.rules[1].most = "a"', "takes an integer"),
        ),
    ],
)
def test_function_of_a_users_that_does_not_fit_is_refused_in_one_line(
    tmp_path: Path, text: str, words: tuple[str, ...]
):
    with pytest.raises(ConfigError) as refused:
        checks.check(_load(tmp_path, text))
    assert "\n" not in str(refused.value)
    for word in words:
        assert word in str(refused.value)


@pytest.mark.parametrize(
    "text",
    [
        '[algo.objective]\nkind = "mine.py:objective"\nlow = 1\nnames = ["a"]',
        '[algo.objective]\nkind = "mine.py:needs"\nlow = "anything"',
        '[algo.objective]\nkind = "mine.py:anything"\nwhatever = true',
        '[algo.objective]\nkind = "mine.py:bound"\nlow = 1',
        '[algo.advantage]\nkind = "mine.py:halves"\nfactor = 2',
    ],
)
def test_function_of_a_users_that_fits_is_accepted(tmp_path: Path, text: str):
    checks.check(_load(tmp_path, text))


def test_options_reach_the_function(tmp_path: Path):
    algo = _load(tmp_path, '[algo.advantage]\nkind = "mine.py:halves"\nfactor = 0.5').algo
    step = StepRewards(rewards=[np.array([2.0, 4.0])], lengths=[np.array([1, 1])], tolerance=0.0)
    assert bind.advantage(algo)(step)[0].tolist() == [1, 2]


def test_group_that_only_its_scores_tell_apart_is_kept_for_an_estimator_of_a_users(tmp_path: Path):
    """The user's estimator may read scores, as gdpo does; only what is equal in all of them cannot teach."""
    algorithm = GroupedAlgorithm(_load(tmp_path, '[algo.advantage]\nkind = "mine.py:halves"\nfactor = 2'))
    scored = ({"a": 1.0, "b": 0.0}, {"a": 0.0, "b": 1.0})
    episodes = tuple(samples.episode(index=at, reward=1.0, scores=scores) for at, scores in enumerate(scored))
    assert algorithm.trainable(samples.group(episodes=episodes)) == ""
    assert algorithm.trainable(samples.group(rewards=(1.0, 1.0))) == "all rewards equal"


def test_what_a_function_of_a_users_raises_names_it(tmp_path: Path):
    config = _load(tmp_path, '[algo.advantage]\nkind = "mine.py:raises"')
    with pytest.raises(
        PipelineError, match=r"algo.advantage.kind = .*mine.py:raises'?: RuntimeError: no such luck \(.*:2"
    ):
        GroupedAlgorithm(config).advantages([samples.group(rewards=(1.0, 0.0)).episodes])


def test_filters_of_a_users_are_asked_in_order_and_must_answer_with_text(tmp_path: Path):
    text = '[[filter.rules]]\nkind = "mine.py:filtered"\nmost = {most}\n[[filter.rules]]\nkind = "mine.py:no_text"'
    judged = samples.group(rewards=(1.0, 0.0, 0.0))
    assert GroupedAlgorithm(_load(tmp_path, text.format(most=2))).trainable(judged) == "too many"
    with pytest.raises(PipelineError, match=r"filter.rules\[1\].kind: it returned 3"):
        GroupedAlgorithm(_load(tmp_path, text.format(most=3))).trainable(judged)
