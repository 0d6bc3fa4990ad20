"""Tiny random models of several architectures and batches for them, shared by the learner's tests."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    Qwen3Config,
)

from corrente.data.types import Batch, Row
from corrente.testing import samples


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """The models are tiny: more threads only wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


VOCABULARY = 61
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CONFIGS: dict[str, Any] = {
    "llama": lambda: LlamaConfig(**COMMON, tie_word_embeddings=True),
    "qwen3": lambda: Qwen3Config(**COMMON, head_dim=4, tie_word_embeddings=False),
    "mistral": lambda: MistralConfig(**COMMON, sliding_window=14),
    "gemma2": lambda: Gemma2Config(**COMMON, head_dim=4, query_pre_attn_scalar=4, final_logit_softcapping=3.0),
    "mamba": lambda: MambaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        state_size=4,
        num_hidden_layers=2,
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "gpt2": lambda: GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=16,
        n_layer=2,
        n_head=4,
        n_positions=128,
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=2,
    ),
}


@pytest.fixture(scope="session")
def build_model() -> Callable[..., Any]:
    """build_model("llama", dtype=torch.float64): random weights, the same for a given seed."""

    def build(name: str = "llama", *, dtype: torch.dtype = torch.float64, seed: int = 0) -> Any:
        torch.manual_seed(seed)
        attention = "eager" if name in ("gemma2", "mamba") else "sdpa"
        model = AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=dtype, attn_implementation=attention)
        for (
            parameter
        ) in model.parameters():  # biases and gains too: at their initial 0 and 1 an error in them would not show
            parameter.data += 0.05 * torch.randn_like(parameter)
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
            elif hasattr(module, "variance_epsilon") and dtype == torch.float64:
                module.forward = functools.partial(_rms_norm, module)
        return model.eval()

    return build


def _rms_norm(module: Any, hidden: torch.Tensor) -> torch.Tensor:
    """In the dtype of the input: the models' own goes through float32, which hides what float64 is here to show."""
    return module.weight * hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + module.variance_epsilon)


@pytest.fixture
def model_dir(build_model: Callable[..., Any], tmp_path: Path) -> Callable[..., Path]:
    """model_dir("gpt2"): a directory with such a model in float32."""

    def write(name: str = "llama", *, seed: int = 0) -> Path:
        path = tmp_path / f"{name}-{seed}"
        build_model(name, dtype=torch.float32, seed=seed).save_pretrained(path)
        (path / "tokenizer_config.json").write_text("{}")
        return path

    return write


@pytest.fixture(scope="session")
def build_batch() -> Callable[..., Batch]:
    """build_batch(groups, per_group, seed=0): rows that share a prefix across groups, a prompt inside them, and beginnings of
    completions; several versions; some tokens between sampled ones that are not trained."""

    def build(groups: int = 4, per_group: int = 3, *, seed: int = 0, version: int = 5, longest: int = 9) -> Batch:
        rng = np.random.default_rng(seed)
        few_shot = rng.integers(3, VOCABULARY, 6)
        rows = [
            _row(rng, group, np.concatenate([few_shot, prompt]), longest=longest, version=version)
            for group, prompt in enumerate(rng.integers(3, VOCABULARY, (groups, 4)))
            for _ in range(per_group)
        ]
        tokens = sum(int(row.loss_mask.sum()) for row in rows)
        return samples.batch(version=version, rows=rows, sequences=len(rows) + 2, tokens=tokens + 7)

    return build


def _row(rng: np.random.Generator, group: int, prompt: np.ndarray, *, longest: int, version: int) -> Row:
    length = int(rng.integers(2, longest + 1))
    completion = rng.integers(3, 6, length)  # few different tokens, so that completions begin alike
    mask = np.concatenate([np.zeros(len(prompt), bool), rng.random(length) < 0.85])
    mask[len(prompt) + length // 2] = True
    count = len(mask)
    return samples.row(
        group=group,
        tokens=np.concatenate([prompt, completion]),
        loss_mask=mask,
        logprobs=rng.normal(-1.5, 0.8, count),
        versions=version - rng.integers(0, 8, count),
        advantages=rng.normal(),
    )


@pytest.fixture(scope="session")
def plain_logprobs() -> Callable[..., list[torch.Tensor]]:
    """Log-probs of each row's trained tokens from one plain forward per row: no tree, no padding, no packing."""

    def compute(model: Any, rows: Sequence[Row], *, temperature: float = 1.0) -> list[torch.Tensor]:
        out = []
        for row in rows:
            ids = torch.from_numpy(row.tokens).long()
            logits = model(input_ids=ids[None]).logits[0, :-1] / temperature
            every = torch.log_softmax(logits, -1).gather(1, ids[1:, None])[:, 0]
            out.append(every[torch.from_numpy(row.loss_mask[1:])])
        return out

    return compute
