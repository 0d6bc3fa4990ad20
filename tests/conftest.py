"""What all tests share: property tests that repeat themselves, and the converted example model where it was fetched.

The default run (see addopts) leaves out `slow`, `model` and `gpu`; `-m` on the command line chooses others.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("corrente", deadline=None, derandomize=True, database=None, max_examples=50)
settings.register_profile("explore", deadline=None, max_examples=1000)
settings.load_profile("corrente")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The converted SmolLM2-135M-Instruct, for tests marked `model`; `make model` fetches it."""
    from corrente import models

    return models.resolve("smollm2-135m-instruct")
