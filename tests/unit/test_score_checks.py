"""Rewards in a config: what is accepted, and that every fault is one line that names key, value and what is allowed."""

from __future__ import annotations

import math
import tomllib
from pathlib import Path
from typing import Any

import pytest

from corrente.config import RunConfig
from corrente.config.load import dump_config, load_config, parse_config
from corrente.config.rewards import FunctionScorer, JudgeScorer, TeacherScorer
from corrente.entrypoints.checks import check_config
from corrente.errors import ConfigError
from corrente.score import checks
from corrente.score.build import scorer_names, scorer_terms, sees_environments
from corrente.score.combined import ScorerTerms
from corrente.score.functions import CALLS_AT_ONCE

JUDGE = {"kind": "judge", "url": "http://h/v1", "model": "m"}


def parse(*scorers: Any, **reward: Any) -> RunConfig:
    return parse_config({"reward": {**reward, "scorers": list(scorers)}})


def test_functions_are_empty_by_default_where_there_are_scorers():
    assert parse_config({}).reward.functions == ("exact_line",)
    assert parse(JUDGE).reward.functions == ()
    assert parse(JUDGE, functions=["exact_match"]).reward.functions == ("exact_match",)
    given = parse_config({}, ['reward.scorers=[{kind="judge", url="http://h/v1", model="m"}]'])
    assert given.reward.functions == ()


def test_scorers_survive_a_dump():
    config = parse(
        {**JUDGE, "template": 'say {completion}\n{{"a": 1}}', "verify": False},
        {"kind": "function", "function": "format_match", "options": {"pattern": "a.*\n", "n": [1, 2.5]}},
        {"kind": "teacher", "path": "somewhere", "top": 4, "failure": "none"},
    )
    again = parse_config(tomllib.loads(dump_config(config)))
    assert again == config
    judge, function, teacher = again.reward.scorers
    assert isinstance(judge, JudgeScorer)
    assert isinstance(function, FunctionScorer)
    assert isinstance(teacher, TeacherScorer)


def test_files_and_models_beside_the_config_are_found_there(tmp_path: Path):
    (tmp_path / "mine.py").write_text("def score(completions):\n    return [0.0 for _ in completions]\n")
    (tmp_path / "rm").mkdir()
    (tmp_path / "run.toml").write_text(
        '[[reward.scorers]]\nkind = "process"\nfunction = "mine.py:score"\n'
        '[[reward.scorers]]\nkind = "reward_model"\npath = "rm"\n'
    )
    process, model = load_config(tmp_path / "run.toml").reward.scorers
    assert process.function == f"{tmp_path}/mine.py:score"  # type: ignore[union-attr]
    assert model.path == str(tmp_path / "rm")  # type: ignore[union-attr]


def test_names_are_given_or_derived_and_numbered():
    config = parse(
        {"kind": "function", "function": "exact_match"},
        {"kind": "function", "function": "exact_match"},
        {"kind": "process", "function": "corrente.score.builtins:think_format", "name": "mine"},
        JUDGE,
        {"kind": "reward_model", "path": "models/org--rm"},
    )
    assert scorer_names(config, ["exact_match"]) == ["exact_match_2", "exact_match_3", "mine", "judge", "org--rm"]


def test_terms_are_those_of_the_table():
    process = {
        "kind": "process",
        "function": "exact_match",
        "workers": 3,
        "weight": 0.5,
        "failure": "default",
        "default": -1,
    }
    function, later = {"kind": "function", "function": "exact_match"}, {"kind": "function", "function": "anyio:sleep"}
    tables = (process, {"kind": "teacher", "path": "x", "at_once": 2}, function, {**function, "at_once": 3}, later)
    made, taught, *functions = map(scorer_terms, parse(*tables).reward.scorers)
    wanted = ScorerTerms(weight=0.5, at_once=3, failure="default", default=-1.0, key=made.key)
    assert made == wanted
    assert (taught.at_once, taught.failure) == (2, "lose")
    assert taught.deadline_s == math.inf  # its process keeps it, batch by batch
    assert [of_function.at_once for of_function in functions] == [CALLS_AT_ONCE, 3, 0]  # as many as it has threads


def with_environments(completions: Any, environments: Any = None) -> list[float]: ...


def with_anything(completions: Any, **columns: Any) -> list[float]: ...


def with_completions(completions: Any) -> list[float]: ...


def test_environments_are_kept_for_functions_that_take_them_or_anything():
    by_path = {"kind": "function", "function": "tests.unit.test_score_checks:with_environments"}
    assert sees_environments(parse(), [with_environments])
    assert sees_environments(parse(), [with_completions, with_anything])
    assert sees_environments(parse(by_path))
    assert not sees_environments(parse(by_path | {"function": "exact_match"}, JUDGE), [with_completions])
    assert not sees_environments(parse(functions=["exact_line"]))


def test_needs_of_functions_and_judges_are_columns():
    config = parse(
        {"kind": "function", "function": "format_match", "options": {"pattern": "a"}},
        {"kind": "process", "function": "boxed_answer"},
        {**JUDGE, "template": "{prompt} {gold} {completion}"},
        functions=["exact_line"],
    )
    assert [needed for _, needed in checks.needed_columns(config)] == [("answer",), (), ("answer",), ("gold",)]


@pytest.mark.parametrize(
    ("scorer", "message"),
    [
        ({"function": "exact_line"}, r'reward.scorers\[0\].kind is missing: it must be one of "function", "process"'),
        ({"kind": "magic"}, r'reward.scorers\[0\].kind = "magic": it must be one of'),
        ({"kind": "function"}, r"reward.scorers\[0\].function is missing"),
        (
            {"kind": "function", "function": "exact_lime"},
            r"reward.scorers\[0\].function = 'exact_lime': no such function",
        ),
        ({**JUDGE, "wieght": 1.0}, r"unknown key reward.scorers\[0\].wieght .*did you mean weight\?"),
        ({**JUDGE, "weight": "much"}, r'reward.scorers\[0\].weight = "much": it must be a number'),
        ({**JUDGE, "weight": float("inf")}, r"reward.scorers\[0\].weight = inf: it must be a number"),
        ({**JUDGE, "deadline_s": 0}, r"reward.scorers\[0\].deadline_s = 0: it must be a number above 0"),
        ({**JUDGE, "failure": "ignore"}, r'failure = "ignore": it must be one of "lose", "none", "default"'),
        ({**JUDGE, "name": "a/b"}, r"reward.scorers\[0\].name = 'a/b'"),
        ({**JUDGE, "name": "exact_line"}, "are called 'exact_line'"),
        ({**JUDGE, "url": "ftp://h"}, r"reward.scorers\[0\].url = 'ftp://h': it must begin with http"),
        ({**JUDGE, "lowest": 10.0}, r"reward.scorers\[0\].lowest = 10: it must be below highest = 10"),
        ({**JUDGE, "pattern": "("}, r"reward.scorers\[0\].pattern = '\(': it must be a regular expression"),
        ({**JUDGE, "pattern": r"\d"}, "it must have one group"),
        ({**JUDGE, "template": "{"}, "template"),
        ({**JUDGE, "template": "{gold}"}, r"reward.scorers\[0\].template needs 'gold', which"),
        ({**JUDGE, "verify": "nowhere.pem"}, r"reward.scorers\[0\].verify = 'nowhere.pem'"),
        ({"kind": "function", "function": "exact_match", "options": {"case": 1}}, r"takes no 'case' \(it takes answer"),
        ({"kind": "function", "function": "format_match"}, "format_match needs 'pattern', which"),
        ({"kind": "reward_model", "path": "nowhere"}, r"path = 'nowhere': it must be a directory"),
        (
            {"kind": "teacher", "path": "runs/t/checkpoints/step-000002/learner"},
            r"\(runs/t has no checkpoint: train it first",
        ),
        ({"kind": "teacher", "path": "nowhere", "default": 2.0}, r"unknown key reward.scorers\[0\].default"),
        ({"kind": "self_teacher", "path": "nowhere"}, r"unknown key reward.scorers\[0\].path"),
        ({"kind": "process_reward", "path": ".", "delimiter": "["}, "must be a directory"),
    ],
)
def test_wrong_scorer_is_refused_in_one_line(scorer: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message) as caught:
        check_config(parse(scorer, functions=["exact_line"]))
    assert "\n" not in str(caught.value)


def _model(folder: Path) -> str:
    (folder / "config.json").write_text("{}")
    return str(folder)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"delimiter": "["}, r"delimiter = '\[': it must be a regular expression"),
        ({"delimiter": "x*"}, r"delimiter = 'x\*': it must not be empty, nor match nothing"),
        ({"separator": ""}, "separator = '': it must not be empty"),
    ],
)
def test_wrong_steps_are_refused(keys: dict[str, Any], message: str, tmp_path: Path):
    with pytest.raises(ConfigError, match=message):
        checks.check_reward_settings(parse({"kind": "process_reward", "path": _model(tmp_path), **keys}))


def test_reward_needs_something_that_gives_one(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"reward.functions = \[\]: give at least one"):
        checks.check_reward_settings(parse(functions=[]))
    with pytest.raises(ConfigError, match="a teacher gives no reward"):
        checks.check_reward_settings(parse({"kind": "teacher", "path": _model(tmp_path)}))


def test_column_that_functions_are_given_anyway_is_refused(tmp_path: Path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a", "answer": "b", "trainer_state": 1}\n')
    config = parse_config({"prompts": {"kind": "jsonl", "path": str(rows)}})
    with pytest.raises(ConfigError, match="rename the column 'trainer_state'"):
        check_config(config)


def test_process_that_asks_for_environments_is_refused(tmp_path: Path):
    file = tmp_path / "mine.py"
    file.write_text("def won(environments): return []\ndef maybe(completions, environments=None): return []\n")
    checks.check_reward_settings(parse({"kind": "function", "function": f"{file}:won"}))
    checks.check_reward_settings(parse({"kind": "process", "function": f"{file}:maybe"}))
    with pytest.raises(
        ConfigError, match=r"scorers\[0\]\.function: .*:won asks for environments, which are objects of this"
    ):
        checks.check_reward_settings(parse({"kind": "process", "function": f"{file}:won"}))
