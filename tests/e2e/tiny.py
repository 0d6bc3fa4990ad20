"""A whole run in seconds: a random tiny Llama with a character tokenizer, and a task it can learn."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from corrente.config import RunConfig
from corrente.config.load import parse_config

ALPHABET = "abcdefgh\n"


def write_model(folder: Path, *, seed: int = 0, ids: int = 0, context: int = 64) -> Path:
    """A two-layer Llama over ``ALPHABET``; pad is eos, as in the real model. With many more ``ids``, which are no letters, it
    seldom ends a completion by itself."""
    vocabulary = {"<s>": 0, "</s>": 1, **{c: i + 2 for i, c in enumerate(ALPHABET)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="</s>",
        clean_up_tokenization_spaces=False,
    ).save_pretrained(folder)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=max(ids, len(vocabulary)),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def write_prompts(path: Path, *, count: int, seed: int = 0) -> Path:
    """``count`` different prompts of four letters, each with the letter to be said as ``answer``."""
    rng = random.Random(seed)
    texts: set[str] = set()
    while len(texts) < count:
        texts.add("".join(rng.choice(ALPHABET[:-1]) for _ in range(4)))
    path.write_text("".join(json.dumps({"prompt": t, "answer": "a"}) + "\n" for t in sorted(texts)))
    return path


def answer_fraction(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """Which part of a completion's characters is the answer's letter."""
    return [sum(c == a for c in text) / max(1, len(text)) for text, a in zip(completions, answer, strict=True)]


def slow_config(tmp_path: Path, *overrides: str) -> RunConfig:
    """An engine slower than the learner: it writes two completions at a time, and is in the middle of some at any moment."""
    tiny_config(tmp_path)
    write_model(tmp_path / "model", ids=256, context=256)
    slow = ("sampling.max_tokens=100", "engine.max_sequences=2", "staleness.max=3")
    return tiny_config(tmp_path, *slow, "filter.zero_variance=keep", "observe.samples=8", "eval.every=0", *overrides)


def tiny_config(tmp_path: Path, *overrides: str, prompts: int = 400, epochs: int = 1) -> RunConfig:
    """A run of 2 prompts x 4 completions a step on the tiny model; files are written once per ``tmp_path``."""
    model, data = tmp_path / "model", tmp_path / "prompts.jsonl"
    if not model.exists():
        write_model(model)
        write_prompts(data, count=prompts)
        write_prompts(tmp_path / "held_out.jsonl", count=4, seed=1)
    tables: dict[str, Any] = {
        "run": {"name": "tiny", "dir": str(tmp_path / "runs"), "steps": 6, "prompts_per_step": 2, "group_size": 4},
        "model": {"path": str(model)},
        "prompts": {
            "kind": "jsonl",
            "path": str(data),
            "eval_path": str(tmp_path / "held_out.jsonl"),
            "epochs": epochs,
        },
        "sampling": {"max_tokens": 6},
        "runtime": {"kind": "inline", "threads": 1},
        "learner": {"lr": 0.02},
        "eval": {"every": 3},
        "checkpoint": {"every": 0},
    }
    return parse_config(tables, overrides)
