"""Alarms with a real engine and a real learner: one whose weights arrive wrong on purpose, and one that must stay silent."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import anyio
import pytest
import torch
from tests.e2e.test_runs import Record
from tests.e2e.tiny import answer_fraction, tiny_config

from corrente.config import RunConfig
from corrente.config.load import dump_config
from corrente.controller import checkpoint_folder, pipeline
from corrente.controller.parts import RunResult
from corrente.entrypoints.assemble import LEARNER, open_parts
from corrente.entrypoints.inputs import RunInputs
from corrente.entrypoints.run_folder import run_folder_path
from corrente.errors import AlarmError, root_cause
from corrente.learner.core import TorchLearner

pytestmark = pytest.mark.slow

SENSITIVE = "alarm.mismatch_max=0.001"


class Garbled(TorchLearner):
    """Ships weights that are not quite those it trains: what a wrong conversion or a lost shard does."""

    def tensors(self) -> Mapping[str, torch.Tensor]:
        noise = torch.Generator().manual_seed(0)
        return {
            name: tensor + 0.05 * torch.randn(tensor.shape, generator=noise)
            for name, tensor in super().tensors().items()
        }


def run(config: RunConfig, *, learner: str = LEARNER) -> tuple[RunResult, Record]:
    record = Record()

    async def go() -> RunResult:
        given = RunInputs(reward_functions=[answer_fraction])
        async with open_parts(
            config,
            sinks=[record],
            inputs=given,
            learner=learner,
            folder=run_folder_path(config) / "checkpoints",
        ) as parts:
            return await pipeline.run(parts)

    try:
        return anyio.run(go), record
    except BaseExceptionGroup as group:
        raise root_cause(group) from None


def test_engine_that_holds_wrong_weights_rings(tmp_path: Path):
    _, record = run(tiny_config(tmp_path, "run.steps=3", SENSITIVE), learner="tests.e2e.test_alarms:Garbled")
    rang = [text for text in record.events if "alarm.mismatch_max" in text]
    assert len(rang) == 1
    assert rang[0].startswith("step 1: mismatch_clean/logprob_gap_mean = ")
    assert "does not hold the learner's weights" in rang[0]
    assert record.steps[-1]["mismatch_clean/logprob_gap_mean"] > 0.001


def test_healthy_run_rings_no_mismatch(tmp_path: Path):
    _, record = run(tiny_config(tmp_path, "run.steps=3", "inflight.kind=recompute", SENSITIVE))
    assert not [text for text in record.events if "alarm.mismatch_max" in text]
    assert record.steps[0]["mismatch_clean/logprob_gap_max"] < 1e-4


def test_alarm_that_stops_leaves_a_checkpoint(tmp_path: Path):
    config = tiny_config(tmp_path, "run.steps=6", "sync.every=2", SENSITIVE, "alarm.action=stop")
    with pytest.raises(AlarmError, match="step 1: mismatch_clean"):
        run(config, learner="tests.e2e.test_alarms:Garbled")
    newest = checkpoint_folder.latest(run_folder_path(config) / "checkpoints")
    assert newest is not None
    assert checkpoint_folder.read(newest).step == 2


def test_command_ends_with_what_rang(tmp_path: Path):
    """With a band that rounding alone leaves."""
    function = 'reward.functions=["tests.e2e.tiny:answer_fraction"]'
    config = tiny_config(tmp_path, function, "alarm.mismatch_max=1e-12", "alarm.action=stop")
    path = tmp_path / "tiny.toml"
    path.write_text(dump_config(config))
    command = [sys.executable, "-c", "from corrente.cli.main import main; main()", "run", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 1
    assert "corrente: AlarmError: step 1: mismatch_clean/logprob_gap_mean = " in done.stderr
    assert checkpoint_folder.latest(tmp_path / "runs" / "tiny" / "checkpoints") is not None
