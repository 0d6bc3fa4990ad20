"""The live sequences by cache row, and the weights that each of them samples from.

Sequences that sample from the same weights are in adjacent rows, older weights first, so that a step is one forward pass over a
slice of the cache for each version in use: one, or two while sequences finish under the weights they began with. New sequences
use the newest weights and go to the end, which keeps that order; removing sequences keeps it too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from corrente.engine.embedded.kv import KVCache
from corrente.engine.embedded.sequence import LiveSequence
from corrente.engine.embedded.weights import EmbeddedWeights


class Segment(NamedTuple):
    """Rows [first, stop) sample from ``weights``."""

    weights: EmbeddedWeights
    first: int
    stop: int


class LiveRows:
    """Live sequences by row; row r of the cache holds the keys and values of the r-th."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._rows: list[LiveSequence] = []
        self._segments: list[Segment] = []

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[LiveSequence]:
        return iter(self._rows)

    def __getitem__(self, rows: slice) -> list[LiveSequence]:
        return self._rows[rows]

    @property
    def segments(self) -> Sequence[Segment]:
        """The segments, oldest weights first; they partition the rows."""
        return self._segments

    def append_rows(self, new: Sequence[LiveSequence], weights: EmbeddedWeights) -> None:
        """Add sequences whose keys and values are in the next rows already, computed by ``weights``, the newest."""
        for live in new:
            live.kv_weights = weights
        first, stop = len(self._rows), len(self._rows) + len(new)
        if self._segments and self._segments[-1].weights is weights:
            first = self._segments.pop().first
        self._segments.append(Segment(weights, first, stop))
        self._rows.extend(new)

    def sample_all_from(self, weights: EmbeddedWeights, *, rebuilt: bool) -> None:
        """Let all sequences sample from ``weights``. ``rebuilt``: their keys and values were computed again with these."""
        for live in self._rows:
            live.kv_weights = weights if rebuilt else None
        self._segments = [Segment(weights, 0, len(self._rows))] if self._rows else []

    def remove_rows(self, rows: Collection[int]) -> None:
        """Remove the sequences in these rows and close the gaps.

        The last sequence of a segment moves into the gap, and its own row goes to the next segment. So each removal copies the
        keys and values of at most one row per segment.
        """
        for row in sorted(rows, reverse=True):
            hole, kept = row, list[Segment]()
            for segment in self._segments:
                if segment.stop <= row:
                    kept.append(segment)
                    continue
                last = segment.stop - 1
                if last != hole:
                    self._rows[hole] = self._rows[last]
                    self._cache.copy_row(last, hole, self._rows[hole].length - 1)
                hole = last
                first = segment.first if segment.first <= row else segment.first - 1
                if first < last:
                    kept.append(Segment(segment.weights, first, last))
            self._segments = kept
            self._rows.pop()
