"""Whole runs through ``run_training``: real engine, real learner, tiny model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio
import pytest
from tests.e2e.tiny import answer_fraction, tiny_config

from corrente.config import RunConfig
from corrente.controller import checkpoint_folder, pipeline
from corrente.controller.parts import RunResult
from corrente.entrypoints.assemble import open_parts
from corrente.entrypoints.inputs import RunInputs
from corrente.entrypoints.run_folder import run_folder_path
from corrente.entrypoints.train import run_training
from corrente.errors import CheckpointError, FailureBudgetError

pytestmark = pytest.mark.slow


class Record:
    """A sink that keeps everything; ``on_step`` is called after each step's metrics."""

    def __init__(self, on_step=None) -> None:
        self.steps: list[dict[str, float]] = []
        self.evals: list[dict[str, float]] = []
        self.spans: list[tuple[str, str]] = []
        self.samples: list[dict[str, Any]] = []
        self.events: list[str] = []
        self.on_step = on_step

    def log_metrics(self, step: int, values: Mapping[str, float]) -> None:
        (self.evals if "eval/episodes" in values else self.steps).append({"step": step, **values})
        if self.on_step and "train/loss" in values:
            self.on_step(step)

    def log_span(self, track: str, name: str, start_s: float, stop_s: float, attrs: Mapping[str, Any]) -> None:
        self.spans.append((track, name))

    def log_sample(self, step: int, sample: Mapping[str, Any]) -> None:
        self.samples.append(dict(sample))

    def log_event(self, level: str, message: str) -> None:
        self.events.append(message)

    def close(self) -> None:
        pass


def run(
    config: RunConfig, *, resume: bool = False, reward=answer_fraction, sink: Record | None = None
) -> tuple[RunResult, Record]:
    record = sink or Record()

    async def go() -> RunResult:
        return await run_training(
            config, sinks=[record], resume=resume, inputs=RunInputs(reward_functions=[reward]), signals=False
        )

    return anyio.run(go), record


@pytest.mark.parametrize("runtime", ["inline", "procs"])
def test_run_learns_and_accounts_for_every_prompt(tmp_path: Path, runtime: str):
    outcome, record = run(tiny_config(tmp_path, f"runtime.kind={runtime}", "run.steps=15", "eval.every=5"))
    assert (outcome.ended, outcome.steps, outcome.version) == ("steps", 15, 15)
    assert outcome.counts["trained"] == 30
    assert outcome.counts["failed"] == 0
    assert record.evals[0]["eval/version"] == 0
    assert record.evals[-1]["eval/version"] == record.evals[-1]["eval/version_max"] == 15
    assert record.evals[-1]["eval/reward"] > record.evals[0]["eval/reward"] + 0.3
    assert max(step["lag/max"] for step in record.steps) <= record.steps[0]["lag/bound"]
    assert record.steps[0]["mismatch/logprob_gap_max"] < 1e-4


@pytest.mark.parametrize(
    "overrides",
    [
        ["buffer.kind=none"],
        ["buffer.kind=double"],
        ["buffer.kind=window", "staleness.max=2", "buffer.window=3"],
        ["buffer.kind=stream", "staleness.reject=2"],
        ["buffer.kind=stream", "staleness.mask=1"],
        ["sync.every=3", "staleness.max=1"],
        ["inflight.kind=recompute"],
        ["inflight.kind=drain"],
        ["inflight.kind=barrier"],
        ["engine.path=hf", "algo.objective.kind=grpo", "algo.advantage.kind=rloo"],
        [
            "algo.objective.kind=dr_grpo",
            "algo.advantage.scale_rewards=none",
            "algo.beta=0.05",
            "filter.zero_variance=keep",
        ],
        ["filter.zero_variance=skip", "staleness.correct=tis"],
        [
            "algo.advantage.kind=reinforce_pp_baseline",
            "algo.num_iterations=2",
            "staleness.correct=tis",
            "staleness.normalise=true",
        ],
        [
            "algo.advantage.kind=gdpo",
            "algo.objective.kind=bnpo",
            "staleness.correct=mis",
            "algo.entropy_coef=0.01",
            "staleness.decay=0.9",
        ],
        ["algo.objective.kind=dppo_tv", "algo.overlong_tokens=2", "algo.beta=0.01", "algo.kl_in=reward", "algo.kl=k1"],
    ],
    ids=lambda overrides: ",".join(overrides),
)
def test_run_with_every_axis_switched(tmp_path: Path, overrides: list[str]):
    outcome, record = run(tiny_config(tmp_path, *overrides))
    assert (outcome.ended, outcome.steps) == ("steps", 6)
    assert outcome.counts["trained"] == 12
    bound = record.steps[0].get("lag/bound")
    assert bound is not None
    assert max(step["lag/max"] for step in record.steps) <= bound
    if "buffer.kind=none" in overrides:
        assert bound == 0


def test_run_ends_cleanly_with_its_data(tmp_path: Path):
    config = tiny_config(tmp_path, "run.steps=1000", "filter.zero_variance=keep", prompts=11, epochs=2)
    outcome, _ = run(config)
    assert outcome.ended == "data"
    assert outcome.counts == {"trained": 22, "filtered": 0, "failed": 0, "stale": 0, "cancelled": 0}
    assert outcome.steps == 11


def test_run_repeats_itself_inline(tmp_path: Path):
    """Synchronous, in one process: a rerun gives the same numbers to the last bit."""
    first, second = (run(tiny_config(tmp_path / "x", "buffer.kind=none", f"run.name={n}"))[1] for n in "ab")
    names = ["train/loss", "train/grad_norm", "reward/mean", "ratio/mean", "completion/tokens_mean"]
    assert [[s[n] for n in names] for s in first.steps] == [[s[n] for n in names] for s in second.steps]
    assert first.samples == second.samples


def test_run_resumed_trains_every_prompt_once(tmp_path: Path):
    """Stopped in the middle, resumed, run to the end of its data: no prompt is lost, none trained twice."""
    overrides = ["run.steps=1000", "filter.zero_variance=keep", "observe.samples=100"]
    config = tiny_config(tmp_path, *overrides, prompts=31)
    stop_at = 5

    async def first_part() -> RunResult:
        stop = anyio.Event()
        record.__init__(on_step=lambda step: stop.set() if step >= stop_at else None)
        folder = run_folder_path(config) / "checkpoints"
        async with open_parts(
            config, sinks=[record], folder=folder, inputs=RunInputs(reward_functions=[answer_fraction])
        ) as parts:
            return await pipeline.run(parts, stop=stop)

    record = Record()
    before = anyio.run(first_part)
    assert before.ended == "stopped"
    assert stop_at <= before.steps < 15
    after, record_after = run(config, resume=True)
    assert after.ended == "data"
    trained = [s["prompt_id"] for s in record.samples + record_after.samples]
    assert len(trained) == 31 * 4
    assert sorted(set(trained)) == sorted(f"0/{row}" for row in range(31))
    assert after.counts["trained"] == 31
    assert record_after.steps[0]["step"] == before.steps + 1
    evaluated = [line["eval/version"] for line in record.evals + record_after.evals]
    assert before.version in evaluated
    assert len(set(evaluated)) == len(evaluated)  # one that the checkpoint knows of is not repeated


def test_run_resumed_after_its_last_step_takes_no_further_step(tmp_path: Path):
    config = tiny_config(tmp_path)
    outcome, _ = run(config)
    weights = (
        (checkpoint_folder.latest(run_folder_path(config) / "checkpoints") or tmp_path)
        / "learner"
        / "model.safetensors"
    )
    before = weights.read_bytes()
    again, record = run(config, resume=True)
    assert (again.steps, again.version) == (outcome.steps, outcome.version)
    assert record.steps == []
    assert weights.read_bytes() == before


def test_run_without_a_checkpoint_cannot_be_resumed(tmp_path: Path):
    with pytest.raises(CheckpointError, match="nothing to resume"):
        run(tiny_config(tmp_path), resume=True)


def test_run_ends_with_the_name_of_a_reward_that_always_fails(tmp_path: Path):
    def broken(completions, **_):
        raise KeyError("no such column")

    with pytest.raises(FailureBudgetError, match=r"broken.*no such column"):
        run(tiny_config(tmp_path), reward=broken)
