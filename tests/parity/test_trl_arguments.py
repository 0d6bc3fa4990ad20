"""TRL's configs and ours: every field of theirs is in the table, with their default. See test_trl.py for how to run it."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import subprocess
from typing import Any

import pytest

from corrente import AsyncGRPOConfig, AsyncGRPOTrainer, GRPOConfig, GRPOTrainer
from corrente.trl.config import DEPRECATED

PYTHON = os.environ.get("CORRENTE_TRL_PYTHON", "")
pytestmark = [
    pytest.mark.trl,
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON, reason="CORRENTE_TRL_PYTHON does not name an interpreter that has trl"),
]

ASK = """
import dataclasses, inspect, json
from trl import GRPOConfig, GRPOTrainer
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

def default(field):
    made = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
    return getattr(made, "value", made)

out = {c.__name__: {f.name: default(f) for f in dataclasses.fields(c)} for c in (GRPOConfig, AsyncGRPOConfig)}
for cls in (GRPOTrainer, AsyncGRPOTrainer):
    out[cls.__name__] = list(inspect.signature(cls.__init__).parameters)
print(json.dumps(out, default=str))
"""
NOT_TAKEN = {"self", "rollout_worker", "weight_transfer"}
"""Protocols of TRL's own workers: what they do is engine.kind and sync.kind here."""


@pytest.fixture(scope="module")
def theirs() -> dict[str, Any]:
    done = subprocess.run([PYTHON, "-W", "ignore", "-c", ASK], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("ours", [GRPOConfig, AsyncGRPOConfig])
def test_config_has_every_argument_of_trl_with_its_default(theirs: dict[str, Any], ours: Any):
    fields = {f.name: f.default for f in dataclasses.fields(ours)}
    asked = theirs[ours.__name__]
    assert [name for name in asked if name not in fields] == []
    assert {n: fields[n] for n in asked if _plain(fields[n]) != asked[n]} == {}


def test_grpo_config_has_nothing_else_but_the_pass_through(theirs: dict[str, Any]):
    fields = {f.name for f in dataclasses.fields(GRPOConfig)}
    assert fields - set(theirs["GRPOConfig"]) == {"corrente", *DEPRECATED}


@pytest.mark.parametrize("ours", [GRPOTrainer, AsyncGRPOTrainer])
def test_trainer_is_constructed_with_the_arguments_of_trl(theirs: dict[str, Any], ours: Any):
    taken = list(inspect.signature(ours.__init__).parameters)
    asked = [name for name in theirs[ours.__name__] if name not in NOT_TAKEN]
    assert [name for name in taken if name in asked] == asked


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
