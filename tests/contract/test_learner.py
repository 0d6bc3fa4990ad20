"""The learner that trains for real keeps the contract of every learner."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import msgspec
import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from corrente.learner.core import TorchLearner
from corrente.runtime.inline import InlineLearner
from corrente.testing import LearnerCase, check_learner, samples

pytestmark = pytest.mark.slow


def test_learner_keeps_the_contract(tmp_path: Path) -> None:
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
        tie_word_embeddings=True,
    )
    model, saved = tmp_path / "model", tmp_path / "saved"
    LlamaForCausalLM(shape).save_pretrained(model)
    saved.mkdir()
    rows = [samples.row(group=group, advantages=advantage) for group, advantage in ((1, 1.0), (1, -1.0), (5, 0.5))]
    batch = samples.batch(rows=rows)
    nan = samples.row(group=1, logprobs=np.nan)

    @asynccontextmanager
    async def make() -> AsyncGenerator[LearnerCase]:
        core = TorchLearner(samples.config(model=model))
        yield LearnerCase(
            learner=InlineLearner(core),
            batch=batch,
            poisoned=msgspec.structs.replace(batch, rows=(nan, *batch.rows[1:])),
            fingerprint=lambda: {name: tensor.tolist() for name, tensor in core.tensors().items()},
        )

    anyio.run(check_learner, make, saved)
