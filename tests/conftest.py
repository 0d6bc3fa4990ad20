"""What all tests share: property tests that repeat themselves, and the converted example model where it was fetched.

The default run (see addopts) leaves out `slow`, `model` and `gpu`; `-m` on the command line chooses others.

Tests compute with one thread, in this process and in workers: two threads that meet after each tiny product spend their time
waiting for one another, ten times as much on a machine that has other work. OMP_NUM_THREADS, where it is set, stands.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile("corrente", deadline=None, derandomize=True, database=None, max_examples=50)
settings.register_profile("explore", deadline=None, max_examples=1000)
settings.load_profile("corrente")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The converted SmolLM2-135M-Instruct, for tests marked `model`; `make model` fetches it."""
    from corrente.models import cache as model_cache

    return model_cache.resolve_model("smollm2-135m-instruct")
