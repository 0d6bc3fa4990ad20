"""Attention over a prefix tree, block by block, for any model that dispatches through Hugging Face's attention interface.

Nodes are in depth-first order, so the nodes of a block [start, stop) attend to the ancestors of its first node and to nodes of
the block itself, nowhere else: an ancestor of a later node that lies before ``start`` has ``start`` in its subtree too. The keys
of a block are thus its depth plus its length, instead of all N: the cost is N * (depth + block) where a dense mask costs
N * N, and in a tree of many short branches nearly all of that square is masked.

Each block is one call of torch's scaled_dot_product_attention. It does no soft capping, sinks or position biases: a model that
asks for them is refused, and its rows are padded instead (policy.py).
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from corrente.data.prefix_tree import Index, Tree

NAME = "corrente_tree"
UNSUPPORTED = ("softcap", "s_aux", "position_bias")
BLOCK_TOKENS = {"cpu": 96, "accelerator": 1024}
"""Nodes attended to at once: small enough to skip what a tree masks, large enough to be worth a call."""


class Block(NamedTuple):
    """Nodes [start, stop), and in ``keys`` the nodes they attend to; mask (1, 1, stop - start, keys): True where they may."""

    start: int
    stop: int
    keys: Tensor
    mask: Tensor


def tree_blocks(tree: Tree, *, device: torch.device, size: int | None = None) -> tuple[Block, ...]:
    """Cut the nodes into blocks of at most ``size``, as equal as can be. None: ``BLOCK_TOKENS`` of the device."""
    size = size or BLOCK_TOKENS["cpu" if device.type == "cpu" else "accelerator"]
    cuts = np.linspace(0, len(tree), -(-len(tree) // size) + 1).astype(int)
    out = []
    for start, stop in pairwise(cuts.tolist()):
        keys = np.concatenate([_ancestors(tree, start), np.arange(start, stop)])
        rows = np.arange(start, stop)[:, None]
        mask = (keys[None] <= rows) & (rows < tree.end[keys][None])
        out.append(
            Block(
                int(start), int(stop), torch.from_numpy(keys).to(device), torch.from_numpy(mask[None, None]).to(device)
            )
        )
    return tuple(out)


def _ancestors(tree: Tree, node: int) -> Index:
    above = []
    while (node := int(tree.parent[node])) >= 0:
        above.append(node)
    return np.array(above[::-1], np.int64)


def tree_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    tree_blocks: tuple[Block, ...] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Query (1, heads, N, d), key and value (1, kv heads, N, d) -> (1, N, heads, d). Without ``tree_blocks``: plain SDPA."""
    if tree_blocks is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    asked = [name for name in UNSUPPORTED if kwargs.get(name) is not None]
    if asked:
        raise ValueError(f"attention over a tree has no {asked[0]}")
    repeats = query.shape[1] // key.shape[1]
    parts = []
    for block in tree_blocks:
        k, v = (t[:, :, block.keys].repeat_interleave(repeats, 1) for t in (key, value))
        q = query[:, :, block.start : block.stop]
        parts.append(nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=block.mask, scale=scaling))
    return torch.cat(parts, 2).transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, tree_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
