"""Properties of a model that are found out by trying it on a small probe: how the learner may call it.

A model is asked for the same numbers in two ways, on three short sequences. Nothing is assumed of its class or its name.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from corrente.data.types import Tokens
from corrente.learner import attention
from corrente.learner.model import device_of, hidden_states, model_logits, to_device
from corrente.learner.packing import Pack, as_rows, as_tree

PROBE_TOLERANCE = 2e-5
"""Relative; float32 rounding is 1e-6, a wrong mask is far above even in a model of small random weights."""


class ModelTraits(NamedTuple):
    """``prefix_tree``: a batch folded into a prefix tree gives every position the hidden state it has in its own sequence.
    ``linear_head``: the output weights times the hidden state are the model's logits."""

    prefix_tree: bool
    linear_head: bool


@torch.no_grad()
def probe_model(model: Any) -> ModelTraits:
    """Try a Hugging Face causal LM. Its attention implementation is afterwards what it was before."""
    before = model.config._attn_implementation
    model.set_attn_implementation(attention.NAME)
    prefix_tree = _probe_tree(model)
    model.set_attn_implementation(before)
    return ModelTraits(prefix_tree=prefix_tree, linear_head=_probe_head(model))


def sliding_window(config: Any) -> int | None:
    """Number of tokens from which on some layer no longer sees all that precedes; None where every layer always does."""
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None)
    if getattr(text, "window_size", None):
        return 0
    if (kinds and all(kind == "full_attention" for kind in kinds)) or not getattr(text, "use_sliding_window", True):
        return None
    limits = (getattr(text, name, None) for name in ("sliding_window", "attention_chunk_size"))
    return min((limit for limit in limits if limit), default=None)


def _probe_tree(model: Any) -> bool:
    pack = _probe_pack(model.config)
    inputs, device = as_tree(pack), device_of(model)
    try:
        folded = hidden_states(model, inputs)[inputs.select_M]
    except (TypeError, ValueError, RuntimeError, IndexError):  # it does not take our mask or positions
        return False
    for r, context in enumerate(pack.contexts):
        ids = to_device(context, device).long()[None]
        alone = model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0]
        own = pack.row_K == r
        if not _close(folded[to_device(inputs.slot_K[own], device)], alone[to_device(pack.at_K[own], device)]):
            return False
    return True


def _probe_head(model: Any) -> bool:
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        return False
    inputs = as_rows(_probe_pack(model.config))
    logits = model_logits(model, inputs)[inputs.select_M]
    return _close(head(hidden_states(model, inputs)[inputs.select_M]), logits)


def _probe_pack(config: Any) -> Pack:
    """Three sequences that share beginnings and differ in length; every position is asked for."""
    ids: Tokens = (np.arange(7, 23, dtype=np.int32) * 37) % config.get_text_config().vocab_size
    contexts = (ids[:8], np.concatenate([ids[:5], ids[9:16]]), np.concatenate([ids[:5], ids[8:11]]))
    counts = [len(context) for context in contexts]
    at_K = np.concatenate([np.arange(count) for count in counts])
    blank_K = np.zeros(len(at_K), np.float32)
    return Pack(
        contexts=contexts,
        row_K=np.repeat(np.arange(3), counts),
        at_K=at_K,
        targets_K=np.zeros(len(at_K), np.int64),
        behaviour_K=blank_K,
        advantages_K=blank_K,
        weights_K=blank_K.astype(np.float64),
        lags_K=np.zeros(len(at_K), np.int32),
        mixed_K=np.zeros(len(at_K), np.bool_),
    )


def _close(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).abs().max() <= PROBE_TOLERANCE * b.abs().max())
