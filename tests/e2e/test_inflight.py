"""Every inflight policy with a real engine and a real learner: what it promises about versions, tokens and restarts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.e2e.test_runs import Record, run
from tests.e2e.tiny import slow_config, tiny_config

from corrente.config import RunConfig
from corrente.controller import checkpoint_folder

pytestmark = pytest.mark.slow

KINDS = ("swap", "recompute", "resume", "drain", "barrier", "cancel", "snapshot")
LONG = ("sampling.max_tokens=40", "observe.samples=8", "staleness.max=2", "eval.every=0")
FROZEN = "learner.lr=1e-30"
"""Steps are taken and weights published, and no weight changes."""


def config(folder: Path, *overrides: str, **how: Any) -> RunConfig:
    return tiny_config(folder, *LONG, *overrides, **how)


def texts(record: Record) -> dict[str, list[str]]:
    """Completions of each trained prompt, in the order of its episodes."""
    out: dict[str, list[str]] = {}
    for sample in record.samples:
        out.setdefault(sample["prompt_id"], []).append(sample["completion"])
    return out


@pytest.mark.parametrize("runtime", ["inline", "procs"])
@pytest.mark.parametrize("kind", KINDS)
def test_policy_trains_and_keeps_its_promise(tmp_path: Path, kind: str, runtime: str):
    outcome, record = run(config(tmp_path, f"inflight.kind={kind}", f"runtime.kind={runtime}", "run.steps=8"))
    assert (outcome.ended, outcome.steps, outcome.counts["trained"]) == ("steps", 8, 16)
    assert max(step["lag/max"] for step in record.steps) <= record.steps[0]["lag/bound"]
    assert all(sample["tokens"] <= 40 for sample in record.samples)
    mixed = [sample for sample in record.samples if len(sample["versions"]) > 1]
    if kind in ("drain", "barrier", "snapshot"):
        assert not mixed
    if kind == "cancel":  # one landing is allowed; one more is seen by what ends before the engine's answer is back
        assert all(len(sample["versions"]) <= 3 for sample in record.samples)
    assert record.steps[0]["mismatch/logprob_gap_max"] < 1e-4


@pytest.mark.parametrize("kind", ["resume", "recompute", "snapshot"])
def test_unchanged_weights_give_the_same_completions_however_they_land(tmp_path: Path, kind: str):
    """Sampled, not greedy: a token's draw depends on the episode's seed and on its position alone."""
    plain = texts(run(config(tmp_path, FROZEN, "run.name=plain"))[1])
    landed = texts(run(config(tmp_path, FROZEN, f"inflight.kind={kind}", "run.name=landed"))[1])
    both = plain.keys() & landed.keys()
    assert len(both) >= 8
    assert {name: plain[name] for name in both} == {name: landed[name] for name in both}


@pytest.mark.parametrize("runtime", ["inline", "procs"])
def test_half_written_completions_go_on_where_a_checkpoint_left_them(tmp_path: Path, runtime: str):
    given = (FROZEN, f"runtime.kind={runtime}", "staleness.max=8")  # more to write than two steps take, however slow
    undisturbed = texts(run(slow_config(tmp_path, *given, "run.name=whole", "run.steps=12"))[1])
    run(slow_config(tmp_path, *given, "run.steps=2"))
    newest = checkpoint_folder.latest(tmp_path / "runs" / "tiny" / "checkpoints")
    assert newest is not None
    unfinished = [u for u in checkpoint_folder.read(newest).unfinished if u.group is None]
    recorded = {u.prompt_id: [a.completion for record in u.answers for a in record] for u in unfinished}
    partial = [
        c for completions in recorded.values() for c in completions if c is not None and c.finish_reason == "abort"
    ]
    assert partial
    assert all(0 < len(c.tokens) < 100 and np.isfinite(c.logprobs).all() for c in partial)

    outcome, record = run(slow_config(tmp_path, *given, "run.steps=12"), resume=True)
    assert outcome.counts["trained"] == 24
    resumed = texts(record)
    both = resumed.keys() & undisturbed.keys() & recorded.keys()
    assert both
    assert {name: resumed[name] for name in both} == {name: undisturbed[name] for name in both}
