"""Keys and values of live sequences: one row per sequence, one slot per token, grown in blocks.

Two views are handed to a model's forward pass, both with one method that takes the new keys and values of a layer and returns
everything the queries may look at:

- ``KVRows``: one new token per live sequence, written into its slot (decoding);
- ``Nodes``: new nodes of a prefix tree, beside nodes whose keys and values are known already (prefill).

Rows [0, live) are live, so a decode step reads a dense slice; a finished row is replaced by a later one. A step reads as many
slots as the longest live sequence has, which is what padding costs; there is no paging.

Shapes: R rows, S slots, H key/value heads, D head size, N nodes, Q queries.
"""

from __future__ import annotations

from typing import Protocol

import torch

Pair = tuple[torch.Tensor, torch.Tensor]

BLOCK = 64


class KVView(Protocol):
    """What a forward pass writes its keys and values to."""

    def update(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> Pair:
        """Take new keys and values (R, H, Q, D) of ``layer``; return all that may be attended to, (R, H, N, D)."""
        ...


class KVCache:
    """Storage, allocated layer by layer when the first keys arrive: the model alone knows its heads and sizes."""

    def __init__(self, *, max_rows: int, max_slots: int) -> None:
        self._max_rows, self._max_slots = max_rows, -(-max_slots // BLOCK) * BLOCK
        self._rows = self._slots = 0
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []

    def reserve(self, rows: int, slots: int) -> None:
        """Make room for ``rows`` sequences of up to ``slots`` tokens, keeping what is held."""
        if rows <= self._rows and slots <= self._slots:
            return
        if rows > self._rows:
            self._rows = min(self._max_rows, max(rows, 2 * self._rows, 8))
        if slots > self._slots:
            wanted = max(slots, self._slots + self._slots // 2)
            self._slots = min(self._max_slots, -(-wanted // BLOCK) * BLOCK)
        for held in (self.keys, self.values):
            for layer, old in enumerate(held):
                held[layer] = self._empty(old)
                held[layer][: old.shape[0], :, : old.shape[2]] = old

    def _empty(self, like: torch.Tensor) -> torch.Tensor:
        """Zeros, not garbage: a masked slot still enters a product with weight 0, and 0 * NaN is NaN."""
        return like.new_zeros(self._rows, like.shape[1], self._slots, like.shape[3])

    def store(self, first_row: int, nodes: Nodes, paths_SL: torch.Tensor) -> None:
        """Copy the keys and values of the nodes on each path into the leading slots of rows from ``first_row`` on. Paths are
        padded to one length with any node: slots beyond a sequence's own are overwritten before they are looked at."""
        count, length = paths_SL.shape
        flat = paths_SL.flatten()
        for layer, pair in enumerate(nodes.pairs):
            if layer == len(self.keys):
                self.keys.append(self._empty(pair[0]))
                self.values.append(self._empty(pair[1]))
            for held, new in zip((self.keys[layer], self.values[layer]), pair, strict=True):
                picked = new[0].index_select(1, flat).unflatten(1, (count, length)).transpose(0, 1)
                held[first_row : first_row + count, :, :length] = picked

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first ``length`` slots of row ``source`` over row ``target``."""
        for held in (self.keys, self.values):
            for tensor in held:
                tensor[target, :, :length] = tensor[source, :, :length]

    def take(self, layer: int, rows: torch.Tensor, slots: torch.Tensor) -> Pair:
        """Keys and values (H, n, D) of n single tokens."""
        return (
            self.keys[layer][rows, :, slots].transpose(0, 1),
            self.values[layer][rows, :, slots].transpose(0, 1),
        )


class KVRows:
    """Decoding: row ``first`` + r writes slot ``slots[r]`` and sees the first ``longest`` slots; a mask hides those beyond its
    own."""

    def __init__(self, cache: KVCache, slots: torch.Tensor, longest: int, *, first: int = 0) -> None:
        self._cache, self._slots, self._longest, self._first = cache, slots, longest, first
        self._places: dict[int, torch.Tensor] = {}

    def update(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> Pair:
        first, count = self._first, len(self._slots)
        pair = self._cache.keys[layer], self._cache.values[layer]
        for held, new in zip(pair, (keys, values), strict=True):
            _, heads, capacity, size = held.shape
            held.view(-1, size).index_copy_(
                0, self._places_of(heads, capacity), new[:, :, 0].reshape(count * heads, size)
            )
        seen = slice(first, first + count), slice(None), slice(self._longest)
        return pair[0][seen], pair[1][seen]

    def _places_of(self, heads: int, capacity: int) -> torch.Tensor:
        """Where the new tokens go in a cache seen as one list of slots, (R x H,): the same for all layers of equal heads.
        index_copy_ runs on one thread; a scatter by three indices would wake all of them for a few kilobytes."""
        if heads not in self._places:
            start, stop = self._first * heads, (self._first + len(self._slots)) * heads
            rows = torch.arange(start, stop, device=self._slots.device)
            self._places[heads] = rows * capacity + self._slots.repeat_interleave(heads)
        return self._places[heads]


class Nodes:
    """Prefill: keys and values of all N nodes of a tree, filled chunk by chunk in pre-order.

    ``known`` nodes are copied from slots of live rows (``rows``, ``slots``) instead of being computed. ``expect`` says which
    nodes the next forward pass computes.
    """

    def __init__(
        self, cache: KVCache, count: int, *, known: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor
    ) -> None:
        self._cache, self._count = cache, count
        self._known, self._rows, self._slots = known, rows, slots
        self._chunk, self._visible = known, 0
        self.pairs: list[Pair] = []

    def expect(self, chunk: torch.Tensor, visible: int) -> None:
        """The next forward pass computes the nodes ``chunk``, which look at nodes [0, visible) at most."""
        self._chunk, self._visible = chunk, visible

    def update(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> Pair:
        if layer == len(self.pairs):
            self.pairs.append(self._open(layer, keys, values))
        all_keys, all_values = self.pairs[layer]
        all_keys[0].index_copy_(1, self._chunk, keys[0])
        all_values[0].index_copy_(1, self._chunk, values[0])
        return all_keys[:, :, : self._visible], all_values[:, :, : self._visible]

    def _open(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> Pair:
        all_keys = keys.new_zeros(1, keys.shape[1], self._count, keys.shape[3])
        all_values = values.new_zeros(1, values.shape[1], self._count, values.shape[3])
        if len(self._known):
            known_keys, known_values = self._cache.take(layer, self._rows, self._slots)
            all_keys[0].index_copy_(1, self._known, known_keys)
            all_values[0].index_copy_(1, self._known, known_values)
        return all_keys, all_values
