"""Runs of odd values: a policy whose every token is a strange tool call, and rows and logs of every type, go on and resume."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
from tests.e2e import tool_tasks
from tests.e2e.tiny import ALPHABET, tiny_config, write_model, write_prompts

from corrente.config import RunConfig, Swap
from corrente.entrypoints import run_folder
from corrente.entrypoints.inputs import RunInputs
from corrente.entrypoints.train import run_training
from corrente.observe.jsonl import JsonlSink, read_lines

pytestmark = pytest.mark.slow

DEEP = "[" * 5000
CALLS = (
    '{"name": "\\ud800", "arguments": {"\\udc00": "\\ud83d"}}',
    '{"name": "take", "arguments": {"a": 1234567890123456789012345}}',
    '{"name": "take", "arguments": {"a": "\\ud800", "b": NaN, "c": 1e999}}',
    f'{{"name": "take", "arguments": {{"a": {DEEP}{"]" * 5000}}}}}',
    DEEP,
    '{"name": "take", "arguments": {"self": null, "function": [[[]]], "": 0}}',
    '{"name": {"name": 1}, "arguments": "[["}',
    '{"function": {"name": "take", "arguments": "{\\"a\\": -99999999999999999999999}"}}',
)


def take(a: int = 0, b: float = 0.0, c: float = 0.0) -> str:
    """Take numbers, and give back what came.

    Args:
        a: A number.
        b: Another.
        c: A third.
    """
    return repr((a, b, c)) + "\ud800"


def with_calls_for_letters(model: Path) -> None:
    """Let every letter of a tiny model stand for a call."""
    tool_tasks.with_true_text(model)
    path = model / "tokenizer.json"
    stored = json.loads(path.read_text())
    letters = dict(zip(ALPHABET, CALLS, strict=False))
    words = {
        f"<tool_call>{letters[word]}</tool_call>" if word in letters else word: at
        for word, at in stored["model"]["vocab"].items()
    }
    stored["model"]["vocab"] = words
    path.write_text(json.dumps(stored))


def scored(completions: list[Any], log_extra: Any, log_metric: Any, **columns: Any) -> list[float]:
    deep: Any = 1
    for _ in range(5000):
        deep = [deep]
    log_extra("deep", [deep] * len(completions))
    log_extra("half \ud800", ["\ud800"] * len(completions))
    log_extra("long", [10**24] * len(completions))
    log_extra("object", [object()] * len(completions))
    log_metric("\ud800", 1.0)
    return [float(at % 2) for at in range(len(completions))]


def go(config: RunConfig, inputs: RunInputs, *, resume: bool) -> Any:
    folder = run_folder.run_folder_path(config)

    async def work() -> Any:
        return await run_training(config, sinks=[JsonlSink(folder)], inputs=inputs, signals=False, resume=resume)

    return anyio.run(work)


@pytest.mark.parametrize("runtime", ["inline", "procs"])
def test_run_of_odd_values_goes_on_through_checkpoints_and_resumes(tmp_path: Path, runtime: str):
    with_calls_for_letters(write_model(tmp_path / "model", context=256))
    write_prompts(tmp_path / "prompts.jsonl", count=4)
    write_prompts(tmp_path / "held_out.jsonl", count=2, seed=1)
    rows = [
        {"prompt": "\ud800ab", "n": 10**24, "when": datetime.datetime(2026, 1, 2), "path": Path("a"), "at": at}
        for at in range(40)
    ]
    config = tiny_config(
        tmp_path,
        *(f"runtime.kind={runtime}", "run.steps=4", "checkpoint.every=1", "eval.every=2", "observe.samples=8"),
        *("env.kind=tools", "env.max_turns=2", "reward.functions=[]", f"chat.template={tool_tasks.TEMPLATE!r}"),
        *("sampling.max_tokens=12", "limits.failure_fraction=0.0"),
    )
    inputs = RunInputs(train_dataset=rows, eval_dataset=rows[:2], tools=[take], reward_functions=[scored])
    config, folder = run_folder.create(config)
    half = msgspec.structs.replace(config, run=msgspec.structs.replace(config.run, steps=2))
    assert go(half, inputs, resume=False).ended == "steps"
    outcome = go(config, inputs, resume=True)
    assert (outcome.ended, outcome.steps, outcome.counts["failed"]) == ("steps", 4, 0)
    shown = list(read_lines(folder / "samples.jsonl"))
    assert len(shown) == 4 * 8
    assert any(sample["extra"]["long"] == 10**24 for sample in shown)
    assert not [event for event in read_lines(folder / "events.jsonl") if "is not used any more" in event["message"]]
    assert isinstance(config.inflight, Swap)
