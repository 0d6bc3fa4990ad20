"""Whole runs of conversations: a tiny model learns to use a tool, and to please an environment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest
from tests.e2e import tool_tasks
from tests.e2e.test_runs import Record
from tests.e2e.tiny import tiny_config, write_model, write_prompts

from corrente.config import RunConfig
from corrente.controller.parts import RunResult
from corrente.entrypoints.inputs import RunInputs
from corrente.entrypoints.train import run_training

pytestmark = pytest.mark.slow

TALK = (
    "reward.functions=[]",
    "sampling.max_tokens=16",
    "env.max_turns=2",
    "run.steps=24",
    "eval.every=0",
    "filter.zero_variance=skip",
)


def talking(tmp_path: Path, *overrides: str, template: str = tool_tasks.TEMPLATE) -> RunConfig:
    tool_tasks.with_true_text(write_model(tmp_path / "model", context=256))
    write_prompts(tmp_path / "prompts.jsonl", count=400)
    write_prompts(tmp_path / "held_out.jsonl", count=4, seed=1)
    return tiny_config(tmp_path, *TALK, f"chat.template={template!r}", *overrides)


def run(config: RunConfig, **given: Any) -> tuple[RunResult, Record]:
    record = Record()

    async def go() -> RunResult:
        return await run_training(config, sinks=[record], inputs=RunInputs(**given), signals=False)

    return anyio.run(go), record


def worst_gap(record: Record) -> float:
    """Between engine and learner, of tokens whose completion is of equal weights: of later turns too, and of forked rows."""
    name = "mismatch_clean/logprob_gap_max"
    return max(step[name] for step in record.steps if name in step)


def rise(record: Record, name: str) -> float:
    """From the first report to the mean of the last four, which are few episodes each."""
    values = [step[name] for step in record.steps if name in step]
    return sum(values[-4:]) / 4 - values[0]


@pytest.mark.parametrize("runtime", [["runtime.kind=inline"], ["runtime.kind=procs", "runtime.placement=shared"]])
def test_policy_learns_to_call_the_tool_that_answers(tmp_path: Path, runtime: list[str]):
    tools = Path(tool_tasks.__file__)
    config = talking(
        tmp_path,
        *runtime,
        "env.kind=tools",
        f"env.functions=['{tools}:a', '{tools}:b']",
        f"env.calls={tool_tasks.CALLS!r}",
        f"reward.functions=['{tools}:called']",
    )
    outcome, record = run(config)
    assert (outcome.ended, outcome.counts["failed"]) == ("steps", 0)
    assert rise(record, "tools/calls") > 1
    assert rise(record, "reward/called") > 0.4
    assert max(step.get("env/forks", 0.0) for step in record.steps) == 0
    assert worst_gap(record) < 1e-4


@pytest.mark.parametrize("credit", ["outcome", "turn"])
def test_policy_learns_to_please_an_environment(tmp_path: Path, credit: str):
    config = talking(
        tmp_path,
        "env.kind=environment",
        f"env.factory='{tool_tasks.__file__}:Echo'",
        f"algo.credit={credit}",
        "eval.every=12",
        template=tool_tasks.FORGETFUL,
    )
    outcome, record = run(config)
    assert (outcome.ended, outcome.counts["failed"]) == ("steps", 0)
    assert rise(record, "reward/Echo") > 0.6
    assert max(step.get("env/forks", 0.0) for step in record.steps) > 0  # both rows of a fork were trained on
    assert [e["eval/episodes"] for e in record.evals] == [4, 4, 4]
    assert worst_gap(record) < 1e-4


def test_objects_are_given_instead_of_named_and_environments_reach_the_rewards(tmp_path: Path):
    tool_tasks.Bell.closed = 0
    made: list[tool_tasks.Bell] = []

    def factory() -> tool_tasks.Bell:
        made.append(tool_tasks.Bell())
        return made[-1]

    config = talking(tmp_path, "env.kind=environment", f"env.calls={tool_tasks.CALLS!r}")
    outcome, record = run(config, environment_factory=factory, reward_functions=[tool_tasks.rung])
    assert (outcome.ended, outcome.counts["failed"]) == ("steps", 0)
    assert rise(record, "reward/Bell") > 0.3
    assert rise(record, "reward/rung") > 0
    assert tool_tasks.Bell.closed == len(made) > 1
    assert len(made) < 60  # used again, though 192 episodes were played
