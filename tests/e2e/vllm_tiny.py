"""A tiny Llama that vLLM can serve on a CPU, a real server of it, and what transformers says its tokens are worth."""

from __future__ import annotations

import string
from collections.abc import Mapping
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from corrente.data.types import Completion, Floats, Sampling, Tokens

ALPHABET = string.ascii_lowercase + string.digits + " +=\n"
CONTEXT = 1664
END = 1
LAYERS = 40


def write_model(folder: Path, *, seed: int = 0, ends: bool = False, layers: int = LAYERS) -> Path:
    """Small layers over ``ALPHABET``, tied, a vocabulary that vLLM has to pad. Unless it ``ends``, no token ends a text.

    There are many of them, for a step must take longer than its answer does: where it does not, vLLM's front end is busy with
    answers until a request is over, and nothing can happen to one that is under way.
    """
    vocabulary = {"<s>": 0, "</s>": END, **{c: i + 2 for i, c in enumerate(ALPHABET)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    special: dict[str, Any] = {"eos_token": "</s>", "pad_token": "</s>"} if ends else {}
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", clean_up_tokenization_spaces=False, **special
    ).save_pretrained(folder)
    build(seed, vocabulary=len(vocabulary), end=END if ends else None, layers=layers).save_pretrained(folder)
    return folder


def build(seed: int, *, vocabulary: int = len(ALPHABET) + 2, end: int | None = None, layers: int = LAYERS) -> Any:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=CONTEXT,
        bos_token_id=0,
        eos_token_id=end,
        pad_token_id=end,
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    return LlamaForCausalLM(config).eval()


def weights(model: Any) -> Mapping[str, torch.Tensor]:
    """As a learner names them: tied embeddings once."""
    return {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}


@torch.no_grad()
def logprobs(model: Any, prompt: Tokens, done: Completion, sampling: Sampling | None = None) -> Floats:
    """Log-prob of every token of ``done`` in one fresh pass, of the distribution that ``sampling`` leaves."""
    ids = torch.from_numpy(np.concatenate([prompt, done.tokens]).astype(np.int64))[None]
    rows = model(ids).logits[0, len(prompt) - 1 : -1].double()
    return _pick(rows, done.tokens, sampling or Sampling())


@torch.no_grad()
def logprobs_across(old: Any, new: Any, prompt: Tokens, done: Completion, at: int) -> Floats:
    """The same where the first ``at`` tokens were sampled by ``old`` and the rest by ``new`` over the keys that ``old`` left."""
    ids = torch.from_numpy(np.concatenate([prompt, done.tokens]).astype(np.int64))[None]
    cached, keys = len(prompt) + at - 1, DynamicCache(config=old.config)
    name = "cache" if "cache" in signature(old.forward).parameters else "past_key_values"
    before = old(ids[:, :cached], use_cache=True, **{name: keys})
    after = new(ids[:, cached:-1], use_cache=True, **{name: keys})
    rows = torch.cat([before.logits[0, len(prompt) - 1 :], after.logits[0]]).double()
    return _pick(rows, done.tokens, Sampling())


def _pick(rows: torch.Tensor, tokens: Tokens, sampling: Sampling) -> Floats:
    rows = rows / (sampling.temperature or 1.0)
    for row in rows:
        if sampling.top_k:
            row[row < row.topk(sampling.top_k).values[-1]] = -torch.inf
        if sampling.top_p < 1:
            order = row.argsort(descending=True)
            before = row.softmax(-1)[order].cumsum(-1) - row.softmax(-1)[order]
            row[order[before >= sampling.top_p]] = -torch.inf
        if sampling.min_p:
            row[row.softmax(-1) < sampling.min_p * row.softmax(-1).max()] = -torch.inf
    picked = rows.log_softmax(-1)[torch.arange(len(tokens)), torch.from_numpy(tokens.astype(np.int64))]
    return picked.float().numpy()
