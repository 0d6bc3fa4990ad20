"""The key/value cache of live sequences: one row per sequence, one slot per token, grown in blocks.

A model's forward pass gets one of two views. Both have one method, which takes the new keys and values of a layer and returns all
keys and values that the queries may attend to:

- ``DecodeKV``: one new token per live sequence, written into its slot;
- ``PrefillKV``: new nodes of a prefix tree, together with nodes whose keys and values are cached already.

Rows [0, live) are live, so a decode step reads a dense slice; a finished row is replaced by a later one. A step reads as many
slots as the longest live sequence has: that is the cost of padding. There is no paging.

Shapes: R rows, S slots, H key/value heads, D head size, N nodes, Q queries.
"""

from __future__ import annotations

from typing import Protocol

import torch

Pair = tuple[torch.Tensor, torch.Tensor]

BLOCK = 64
"""Slots by which the cache grows."""


class KVView(Protocol):
    """Contract: a forward pass writes its keys and values through this, layer by layer."""

    def update(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> Pair:
        """Take new keys and values (R, H, Q, D) of ``layer``; return all that may be attended to, (R, H, N, D)."""
        ...


class KVCache:
    """The storage, allocated for a layer when its first keys arrive, since only the model knows its heads and sizes."""

    def __init__(self, *, max_rows: int, max_slots: int) -> None:
        self._max_rows, self._max_slots = max_rows, -(-max_slots // BLOCK) * BLOCK
        self._rows = self._slots = 0
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []

    def ensure_capacity(self, rows: int, slots: int) -> None:
        """Grow to hold ``rows`` sequences of up to ``slots`` tokens; the present contents stay."""
        if rows <= self._rows and slots <= self._slots:
            return
        if rows > self._rows:
            self._rows = min(self._max_rows, max(rows, 2 * self._rows, 8))
        if slots > self._slots:
            wanted = max(slots, self._slots + self._slots // 2)
            self._slots = min(self._max_slots, -(-wanted // BLOCK) * BLOCK)
        for held in (self.keys, self.values):
            for layer, old in enumerate(held):
                held[layer] = self._allocate_like(old)
                held[layer][: old.shape[0], :, : old.shape[2]] = old

    def _allocate_like(self, like: torch.Tensor) -> torch.Tensor:
        """Allocate zeros in the present size, with the heads, head size and dtype of ``like``."""
        # Zeros, not empty memory: a masked slot enters the attention product with weight 0, and 0 * NaN is NaN.
        return like.new_zeros(self._rows, like.shape[1], self._slots, like.shape[3])

    def store_paths(self, first_row: int, nodes: PrefillKV, paths_SL: torch.Tensor) -> None:
        """Copy the keys and values of the nodes on each path (S, L) into the leading slots of rows from ``first_row`` on.

        Paths are padded to one length with any node: the slots beyond a sequence's own are overwritten before they are read.
        """
        count, length = paths_SL.shape
        flat = paths_SL.flatten()
        for layer, pair in enumerate(nodes.pairs):
            if layer == len(self.keys):
                self.keys.append(self._allocate_like(pair[0]))
                self.values.append(self._allocate_like(pair[1]))
            for held, new in zip((self.keys[layer], self.values[layer]), pair, strict=True):
                picked = new[0].index_select(1, flat).unflatten(1, (count, length)).transpose(0, 1)
                held[first_row : first_row + count, :, :length] = picked

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Copy the first ``length`` slots of row ``source`` over row ``target``."""
        for held in (self.keys, self.values):
            for tensor in held:
                tensor[target, :, :length] = tensor[source, :, :length]

    def gather_tokens(self, layer: int, rows: torch.Tensor, slots: torch.Tensor) -> Pair:
        """Keys and values (H, n, D) of n single tokens, given by their rows and slots (n,)."""
        return (
            self.keys[layer][rows, :, slots].transpose(0, 1),
            self.values[layer][rows, :, slots].transpose(0, 1),
        )


class DecodeKV:
    """The view for decoding: row ``first`` + r writes slot ``slots[r]`` and reads the first ``longest`` slots.

    The attention mask hides the slots beyond a row's own length.
    """

    def __init__(self, cache: KVCache, slots: torch.Tensor, longest: int, *, first: int = 0) -> None:
        self._cache, self._slots, self._longest, self._first = cache, slots, longest, first
        self._indices_by_heads: dict[int, torch.Tensor] = {}

    def update(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> Pair:
        first, count = self._first, len(self._slots)
        pair = self._cache.keys[layer], self._cache.values[layer]
        for held, new in zip(pair, (keys, values), strict=True):
            _, heads, capacity, size = held.shape
            held.view(-1, size).index_copy_(
                0, self._slot_indices(heads, capacity), new[:, :, 0].reshape(count * heads, size)
            )
        seen = slice(first, first + count), slice(None), slice(self._longest)
        return pair[0][seen], pair[1][seen]

    def _slot_indices(self, heads: int, capacity: int) -> torch.Tensor:
        """Indices (R x H,) of the new tokens in a cache viewed as one list of slots; equal for layers with equal heads."""
        # One index for index_copy_, which runs on one thread: a scatter by three indices wakes all threads for a few kilobytes.
        if heads not in self._indices_by_heads:
            start, stop = self._first * heads, (self._first + len(self._slots)) * heads
            rows = torch.arange(start, stop, device=self._slots.device)
            self._indices_by_heads[heads] = rows * capacity + self._slots.repeat_interleave(heads)
        return self._indices_by_heads[heads]


class PrefillKV:
    """The view for prefill: keys and values of all N nodes of a tree, filled chunk by chunk in pre-order.

    The nodes ``known`` are copied from the slots of live rows (``rows``, ``slots``) instead of being computed. ``set_chunk`` says
    which nodes the next forward pass computes.
    """

    def __init__(
        self, cache: KVCache, count: int, *, known: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor
    ) -> None:
        self._cache, self._count = cache, count
        self._known, self._rows, self._slots = known, rows, slots
        self._chunk, self._visible = known, 0
        self.pairs: list[Pair] = []

    def set_chunk(self, chunk: torch.Tensor, visible: int) -> None:
        """Let the next forward pass compute the nodes ``chunk`` (Q,), which attend to nodes [0, visible) at most."""
        self._chunk, self._visible = chunk, visible

    def update(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> Pair:
        if layer == len(self.pairs):
            self.pairs.append(self._allocate_layer(layer, keys, values))
        all_keys, all_values = self.pairs[layer]
        all_keys[0].index_copy_(1, self._chunk, keys[0])
        all_values[0].index_copy_(1, self._chunk, values[0])
        return all_keys[:, :, : self._visible], all_values[:, :, : self._visible]

    def _allocate_layer(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> Pair:
        all_keys = keys.new_zeros(1, keys.shape[1], self._count, keys.shape[3])
        all_values = values.new_zeros(1, values.shape[1], self._count, values.shape[3])
        if len(self._known):
            known_keys, known_values = self._cache.gather_tokens(layer, self._rows, self._slots)
            all_keys[0].index_copy_(1, self._known, known_keys)
            all_values[0].index_copy_(1, self._known, known_values)
        return all_keys, all_values
