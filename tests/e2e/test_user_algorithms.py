"""Objective, estimator and filter of a user's, as the how-to writes them, in whole runs on a tiny model."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import msgspec
import pytest
from tests.e2e.test_runs import run
from tests.e2e.tiny import tiny_config

from corrente.config import RunConfig
from corrente.config.load import dump_config, parse_config
from corrente.entrypoints.checks import check_config
from corrente.errors import CorrenteError, NothingToLearnError

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "write-an-objective.md"


def _config(tmp_path: Path, *overrides: str) -> RunConfig:
    """A run with the functions of the page."""
    for name, text in re.findall(r"^```python file=(\w+\.py)\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL):
        (tmp_path / name).write_text(text)
    config = tiny_config(
        tmp_path,
        f"algo.objective.kind={tmp_path}/mine.py:banded",
        "algo.objective.low=0.8",
        f"algo.advantage.kind={tmp_path}/medians.py:median",
        "algo.advantage.scale=2.0",
        f'filter.rules=[{{kind="{tmp_path}/lengths.py:too_short", tokens=2}}]',
        *overrides,
    )
    check_config(config)
    return config


@pytest.mark.parametrize("runtime", ["inline", "procs"])
def test_functions_of_a_users_learn_and_are_found_again_by_a_resumed_run(tmp_path: Path, runtime: str):
    config = _config(tmp_path, f"runtime.kind={runtime}", "run.steps=12", "eval.every=4", "staleness.mask=1")
    outcome, record = run(config)
    assert (outcome.ended, outcome.steps) == ("steps", 12)
    assert record.evals[-1]["eval/reward"] > record.evals[0]["eval/reward"] + 0.2
    assert any(step["train/clip_fraction"] > 0 for step in record.steps)
    assert parse_config(tomllib.loads(dump_config(config))) == config
    longer = msgspec.structs.replace(config, run=msgspec.structs.replace(config.run, steps=14))
    again, record = run(longer, resume=True)
    assert (again.steps, len(record.steps)) == (14, 2)


def test_filter_of_a_users_says_why_a_group_is_dropped(tmp_path: Path):
    rules = f'filter.rules=[{{kind="{tmp_path}/lengths.py:too_short", tokens=1000}}]'
    with pytest.raises(NothingToLearnError, match="every completion is short"):
        run(_config(tmp_path, rules, "filter.patience=2"))


@pytest.mark.parametrize("runtime", ["inline", "procs"])
@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("return inputs.logprobs_K.mean()", r"shape \(\) for \d+ tokens"),
        ("return inputs.no_such_thing", r"broken.py:f'?: AttributeError.*no_such_thing.*broken.py:2"),
    ],
)
def test_objective_of_a_users_that_fails_ends_the_run_with_its_name(
    tmp_path: Path, runtime: str, body: str, words: str
):
    file = tmp_path / "broken.py"
    file.write_text(f"def f(inputs):\n    {body}\n")
    with pytest.raises(CorrenteError, match=words):
        run(tiny_config(tmp_path, f"algo.objective.kind={file}:f", f"runtime.kind={runtime}"))
