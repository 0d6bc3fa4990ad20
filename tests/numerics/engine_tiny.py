"""Tiny models with random weights, one of each architecture, and an engine that serves one of them."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    GPTNeoConfig,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    OPTConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from corrente.data.types import ApplyMode, Completion, Request, Sampling, Tokens
from corrente.engine.embedded.core import EmbeddedCore
from corrente.sync import pack
from corrente.sync.base import Update

VOCABULARY = 600
"""More than two blocks of the sampler and not a multiple of one."""
CONTEXT = 96

_ROPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}

CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: LlamaConfig(**_ROPE, tie_word_embeddings=True),
    "llama_biased": lambda: LlamaConfig(
        **_ROPE, attention_bias=True, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    ),
    "mistral": lambda: MistralConfig(**_ROPE, head_dim=16, sliding_window=None),
    "qwen2": lambda: Qwen2Config(**_ROPE, tie_word_embeddings=True),
    "qwen3": lambda: Qwen3Config(**_ROPE, head_dim=16),
    "gpt2": lambda: GPT2Config(
        vocab_size=VOCABULARY, n_positions=CONTEXT, n_embd=48, n_layer=3, n_head=4, bos_token_id=0, eos_token_id=1
    ),
    "opt": lambda: OPTConfig(**_ROPE, ffn_dim=80, word_embed_proj_dim=48),
    "gpt_neox": lambda: GPTNeoXConfig(**_ROPE),
    "gemma2": lambda: Gemma2Config(**_ROPE, head_dim=16, sliding_window=CONTEXT),
    "mixtral": lambda: MixtralConfig(**_ROPE, num_local_experts=4),
    "qwen3_moe": lambda: Qwen3MoeConfig(
        **_ROPE, head_dim=8, moe_intermediate_size=24, num_experts=8, num_experts_per_tok=3, norm_topk_prob=True
    ),
    "gpt_neo_local": lambda: GPTNeoConfig(
        vocab_size=VOCABULARY, hidden_size=48, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]]
    ),
}


def build(kind: str, seed: int) -> Any:
    """A model whose every weight, norms and biases included, is random, and whose logits are far from flat."""
    torch.manual_seed(seed)
    model: Any = AutoModelForCausalLM.from_config(CONFIGS[kind](), dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_norm = parameter.ndim == 1 and name.endswith("weight")
            parameter.normal_(1.0 if is_norm else 0.0, 0.2)
    return model.eval()


@functools.cache
def tiny(kind: str) -> tuple[Path, Any, Any]:
    """The directory of a tiny model (configuration only), the model, and another of that architecture with other weights."""
    model, other = build(kind, 1), build(kind, 2)
    path = Path(tempfile.mkdtemp(prefix=f"corrente-tiny-{kind}-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    model.config.save_pretrained(path)
    model.generation_config.save_pretrained(path)
    return path, model, other


def spell(path: Path) -> tuple[Path, Any]:
    """The tiny llama with a tokenizer whose token i is a letter pair, in directory ``path``."""
    where, model, _ = tiny("llama")
    names = {chr(97 + i // 26) + chr(97 + i % 26): i for i in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(names, unk_token="aa"))
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(path)
    for name in ("config.json", "generation_config.json"):
        (path / name).write_bytes((where / name).read_bytes())
    return path, model


class Served:
    """An engine over two buffers, with ``model`` live as version 0 in buffer 0."""

    def __init__(self, path: Path, model: Any, *, kind: str = "auto", **options: Any) -> None:
        self.core = EmbeddedCore(model=path, path=kind, **options)
        self.layout = self.core.layout()
        self.buffers = [torch.zeros(self.layout.nbytes, dtype=torch.uint8) for _ in range(2)]
        self.core.attach(self.buffers)
        self.flip(model, 0)

    def flip(self, model: Any, version: int, mode: ApplyMode = "swap") -> None:
        pack.write(self.layout, model.state_dict(), self.buffers[version % 2])
        self.core.apply(Update(version=version, slot=version % 2), mode)

    def submit(self, tokens: Sequence[int] | Tokens, sampling: Sampling, *, name: str = "r", seed: int = 0) -> None:
        self.core.submit(Request(id=name, tokens=np.asarray(tokens, np.int32), sampling=sampling, seed=seed))

    def interrupted(self, request: Request, *, steps: int) -> Completion:
        """What ``request`` has when it is aborted after so many steps, the first of which samples two tokens."""
        self.core.submit(request)
        for _ in range(steps):
            assert not self.core.step()
        self.core.abort([request.id])
        ((_, partial),) = self.core.step()
        assert isinstance(partial, Completion)
        return partial

    def finish(self) -> dict[str, Completion]:
        done: dict[str, Completion] = {}
        while not self.core.idle:
            for name, outcome in self.core.step():
                assert isinstance(outcome, Completion), outcome
                done[name] = outcome
        return done

    def run(self, prompts: Sequence[Tokens], sampling: Sampling) -> list[Completion]:
        for at, tokens in enumerate(prompts):
            self.submit(tokens, sampling, name=str(at), seed=at)
        done = self.finish()
        return [done[str(at)] for at in range(len(prompts))]
