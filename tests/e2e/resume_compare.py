"""What a run of the resume harness came to, and whether it is what a run that nobody killed came to."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from corrente.common import serialization
from corrente.controller import checkpoint_folder
from corrente.controller.snapshot import Snapshot

ROWS, STEPS = 24, 12
"""Prompts and steps of a run."""
UNREPEATABLE = ("time/", "wait/", "engine/", "learner/", "score/", "sync/", "publish/", "buffer/")
"""Beginnings of the names of metrics that depend on the clock, or count since the process began; so do those that end in _s."""


def record(folder: Path) -> dict[str, Any]:
    """What a run came to, without what the clock says; and without the admission numbers of groups, which are never used twice:
    what was under way at a checkpoint gets another one when it is admitted again."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    newest = checkpoint_folder.latest(folder / "checkpoints")
    assert newest is not None
    return {
        "steps": [_repeatable(line) for line in lines if "version/learner" in line],
        "evaluations": [_repeatable(line) for line in lines if "eval/episodes" in line],
        "samples": [{name: value for name, value in sample.items() if name != "group"} for sample in samples],
        "weights": {path.name: path.read_bytes() for path in sorted((newest / "learner").glob("*.safetensors"))},
        "state": _plain(torch.load(newest / "learner" / "learner.pt", weights_only=True)),
        "checkpoint": newest.name,
    }


def check(folder: Path, whole: Path, log: Path, *, exact: bool, begun: int) -> None:
    """AssertionError when the run in ``folder`` is not what the run in ``whole`` is. ``begun``: how often a prompt may have been
    generated."""
    mine, theirs = record(folder), record(whole)
    assert [line["step"] for line in mine["steps"]] == list(range(1, STEPS + 1))
    trained = Counter(sample["prompt_id"] for sample in mine["samples"])
    assert set(trained.values()) == {4}, "not every prompt was trained once"
    assert len(trained) == ROWS
    texts = {sample["prompt"] for sample in mine["samples"]}
    asked = Counter(log.read_text().splitlines())
    assert texts <= asked.keys()
    assert max(asked[text] for text in texts) <= begun, "rewards were asked more often than the run was begun"
    newest = checkpoint_folder.latest(folder / "checkpoints")
    assert newest is not None
    snapshot = serialization.decode((newest / checkpoint_folder.CONTROL).read_bytes(), Snapshot)
    assert (snapshot.step, snapshot.ledger.outcomes.get("trained"), snapshot.unfinished) == (STEPS, ROWS, ())
    bounds = [(line["lag/max"], line["lag/bound"]) for line in mine["steps"] if "lag/bound" in line]
    assert all(lag <= bound for lag, bound in bounds)
    assert not [path.name for path in (folder / "checkpoints").iterdir() if path.name.startswith(".")] or not exact
    evaluated = [line["step"] for line in mine["evaluations"]]
    assert len(set(evaluated)) == len(evaluated), "an evaluation is recorded twice"
    if exact:
        for key in theirs:
            assert mine[key] == theirs[key], f"{key} differ: {_difference(mine[key], theirs[key])}"


def _repeatable(line: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value for name, value in line.items() if not name.startswith(UNREPEATABLE) and not name.endswith("_s")
    }


def _plain(value: Any) -> Any:
    """Tensors as bytes, so that equality is that of bits."""
    if isinstance(value, torch.Tensor):
        return (str(value.dtype), tuple(value.shape), value.numpy().tobytes())
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value


def _difference(mine: Any, theirs: Any) -> str:
    """The first place where two records differ."""
    if isinstance(mine, dict) and isinstance(theirs, dict):
        for key in {**theirs, **mine}:
            if mine.get(key) != theirs.get(key):
                return f"{key}: {_difference(mine.get(key), theirs.get(key))}"
    if isinstance(mine, list) and isinstance(theirs, list) and len(mine) == len(theirs):
        at = next(at for at, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b)
        return f"[{at}] {_difference(mine[at], theirs[at])}"
    return f"{str(mine)[:200]} is not {str(theirs)[:200]}"
