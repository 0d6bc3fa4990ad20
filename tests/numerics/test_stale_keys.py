"""Keys and values of older weights, told apart from numerics and from staleness: engine, learner and metrics together."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.numerics.engine_tiny import Served, tiny

from corrente import config as c
from corrente.algo import graph
from corrente.data.types import ApplyMode, Sampling
from corrente.learner.core import TorchLearner
from corrente.testing import samples

PROMPT = np.arange(20, 40, dtype=np.int32)
LONG = Sampling(max_tokens=30)
BEFORE = 8
"""Tokens that are sampled before the new weights land."""


def report(folder: Path, mode: ApplyMode, *, kind: str = "llama") -> dict[str, float]:
    """Two requests are half written when version 1 lands, two begin after it; what the learner says of all four, at version 1."""
    where, before, after = tiny(kind)
    served = Served(where, before)
    for name in "ab":
        served.submit(PROMPT, LONG, name=name, seed=ord(name))
    for _ in range(BEFORE - 1):  # the first samples two: after its prefill, and after a decode
        assert not served.core.step()
    served.flip(after, 1, mode)
    for name in "cd":
        served.submit(PROMPT, LONG, name=name, seed=ord(name))
    done = served.finish()
    rows = []
    for at, completion in enumerate(done[name] for name in "abcd"):
        episode = samples.episode(index=at, turns=[PROMPT, completion])
        rows += graph.rows(0, episode, advantages_T=np.ones(len(completion.tokens)), oldest=None)
    after.save_pretrained(folder)
    core = TorchLearner(c.RunConfig(model=c.Model(path=str(folder)), sampling=LONG))
    return core.step(samples.batch(version=1, rows=rows))


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_stale_keys_are_seen_behind_mixed_prefixes_alone(tmp_path: Path, mode: ApplyMode):
    found = report(tmp_path, mode)
    assert found["lag1/tokens"] == 2 * BEFORE
    assert found["mismatch_clean/tokens"] > 10
    assert found["mismatch_mixed/tokens"] > 10
    assert found["mismatch_clean/logprob_gap_max"] < 1e-4
    if mode == "recompute":
        assert found["mismatch_mixed/logprob_gap_max"] < 1e-4
    else:
        assert found["mismatch_mixed/logprob_gap_mean"] > 0.1
        assert found["mismatch_mixed/kl_k3"] > 0.01
