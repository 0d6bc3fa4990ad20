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

from corrente.config import LearnerConfig, Model, RunConfig
from corrente.data.types import Batch, Row
from corrente.learner.core import TorchLearner
from corrente.runtime.inline import InlineLearner
from corrente.testing import LearnerCase, check_learner

pytestmark = pytest.mark.slow


def _row(group: int, advantage: float) -> Row:
    mask = np.array([False] * 3 + [True] * 4)
    return Row(
        group=group,
        tokens=np.arange(group, group + 7, dtype=np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, np.float32(-2.5), np.float32(0)),
        versions=np.zeros(7, np.int32),
        advantages=np.where(mask, np.float32(advantage), np.float32(0)),
    )


def test_the_learner_keeps_the_contract(tmp_path: Path) -> None:
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
    batch = Batch(step=0, version=0, rows=(_row(1, 1.0), _row(1, -1.0), _row(5, 0.5)), sequences=3, tokens=12)
    nan = msgspec.structs.replace(batch.rows[0], logprobs=np.full(7, np.nan, np.float32))

    @asynccontextmanager
    async def make() -> AsyncGenerator[LearnerCase]:
        core = TorchLearner(RunConfig(model=Model(path=str(model)), learner=LearnerConfig(lr=1e-2)))
        yield LearnerCase(
            learner=InlineLearner(core),
            batch=batch,
            poisoned=msgspec.structs.replace(batch, rows=(nan, *batch.rows[1:])),
            fingerprint=lambda: {name: tensor.tolist() for name, tensor in core.tensors().items()},
        )

    anyio.run(check_learner, make, saved)
