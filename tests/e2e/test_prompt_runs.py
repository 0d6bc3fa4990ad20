"""Whole runs on a stream of conversations, with a tracker: what the policy read, what rewards saw, what a resume repeats."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
from tests.e2e.test_runs import Record
from tests.e2e.tiny import ALPHABET, tiny_config

from corrente import config
from corrente.config import RunConfig
from corrente.controller.parts import RunResult
from corrente.entrypoints.inputs import RunInputs
from corrente.entrypoints.train import run_training
from corrente.errors import ConfigError
from corrente.observe.trackers import open_trackers

pytestmark = pytest.mark.slow

ROWS = 20
TEMPLATE = (
    "{% for message in messages %}{{ message.content }}{% endfor %}{% if add_generation_prompt %}{{ turn }}{% endif %}"
)


def chats() -> Iterator[dict[str, Any]]:
    """Different conversations over the letters of the tiny model."""
    rng = random.Random(0)
    for _ in range(ROWS):
        asked = "".join(rng.choice(ALPHABET[:-1]) for _ in range(4))
        yield {"prompt": [{"role": "user", "content": asked}], "answer": "a"}


def _config(tmp_path: Path, *overrides: str) -> RunConfig:
    """A run over the whole stream; what stands before an answer is a template's switch."""
    made = tiny_config(
        tmp_path, "run.steps=1000", "filter.zero_variance=keep", "observe.samples=100", "eval.every=0", *overrides
    )
    chat = config.Chat(template=TEMPLATE, template_kwargs={"turn": "h"}, system="g")
    return msgspec.structs.replace(made, prompts=config.GivenRows(shuffle_window=6), chat=chat)


def _run(
    made: RunConfig, given: RunInputs, record: Record, *, resume: bool = False, stop_at: float = math.inf
) -> RunResult:
    async def go() -> RunResult:
        stop = anyio.Event()
        record.on_step = lambda step: stop.set() if step >= stop_at else None
        return await run_training(made, sinks=[record], resume=resume, inputs=given, signals=False, stop=stop)

    return anyio.run(go)


def test_run_on_a_stream_of_conversations_trains_each_once_across_a_resume(tmp_path: Path):
    seen: list[tuple[Any, Any]] = []

    def look(prompts: Any, completions: Any, answer: list[str], log_extra: Any) -> list[float]:
        seen.extend(zip(prompts, completions, strict=True))
        said = [messages[0]["content"] for messages in completions]
        log_extra("said", said)
        return [text.count(letter) / max(1, len(text)) for text, letter in zip(said, answer, strict=True)]

    made = _config(tmp_path)
    given, before, after = RunInputs(train_dataset=chats, reward_functions=[look]), Record(), Record()
    assert _run(made, given, before, stop_at=4).ended == "stopped"
    assert _run(made, given, after, resume=True).ended == "data"
    samples = before.samples + after.samples
    assert sorted({s["prompt_id"] for s in samples}) == sorted(f"0/{row}" for row in range(ROWS))
    assert len(samples) == ROWS * made.run.group_size
    asked = {row["prompt"][0]["content"] for row in chats()}
    assert {s["prompt"] for s in samples} == {f"g{text}h" for text in asked}, "system message, question, switch"
    assert {prompt[0]["content"] for prompt, _ in seen} == asked
    assert all(len(prompt) == 1 and prompt[0]["role"] == "user" for prompt, _ in seen)
    assert all(said[0]["role"] == "assistant" for _, said in seen)
    assert all(s["extra"]["said"] == s["completion"] for s in samples)


def test_run_with_trackers_goes_on_when_one_of_them_fails(tmp_path: Path):
    pytest.importorskip("tensorboard")
    made = _config(tmp_path, "run.steps=3", 'observe.trackers=["tensorboard"]')
    (tmp_path / "good").mkdir()
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "tensorboard").write_text("a file where the folder should be")
    trackers = [*open_trackers(made, tmp_path / "bad"), *open_trackers(made, tmp_path / "good")]
    record = Record()

    async def go() -> RunResult:
        given = RunInputs(
            train_dataset=chats, reward_functions=[lambda completions: [float(i) for i, _ in enumerate(completions)]]
        )
        return await run_training(made, sinks=[record, *trackers], inputs=given, signals=False)

    assert anyio.run(go).steps == 3
    assert len([event for event in record.events if "tensorboard failed and is not used any more" in event]) == 1
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "good" / "tensorboard"))
    events.Reload()
    assert [e.step for e in events.Scalars("train/loss")] == [1, 2, 3]
    rewards = [step["reward/mean"] for step in record.steps if "reward/mean" in step]
    assert [e.value for e in events.Scalars("train/reward")] == pytest.approx(rewards)


def test_function_that_asks_for_a_column_the_dataset_lacks_is_refused_before_a_model_is_loaded(tmp_path: Path):
    made = msgspec.structs.replace(_config(tmp_path), runtime=config.Procs(start_deadline_s=0.001))

    def gold(completions: Any, gold: Any) -> list[float]:
        return [0.0 for _ in completions]

    with pytest.raises(
        ConfigError, match=r"gold needs 'gold', which the dataset does not have in every row .columns: answer"
    ):
        _run(made, RunInputs(train_dataset=chats, reward_functions=[gold]), Record())
