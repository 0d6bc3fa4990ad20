"""Sums over the sequences inside a flat micro-batch. Shapes: K trained tokens, R rows.

A row is never split over micro-batches, and its trained tokens stand together in order, so whatever concerns a whole sequence
(ratios, means, returns) is computed from one micro-batch alone. Sums are in float64: a product of ratios over a long
sequence is the exponential of one.
"""

from __future__ import annotations

import torch
from torch import Tensor


class TrainingRows:
    """The rows that K tokens belong to. ``row_K`` (K,): the row of each; None: all are of one row."""

    def __init__(self, row_K: Tensor | None, *, like: Tensor) -> None:
        given_K = (
            torch.zeros(len(like), dtype=torch.long, device=like.device) if row_K is None else row_K.to(like.device)
        )
        _, self._index_K, self._count_R = torch.unique_consecutive(given_K, return_inverse=True, return_counts=True)

    @property
    def length_K(self) -> Tensor:
        """Trained tokens of the row each token is of (K,)."""
        return self._count_R[self._index_K]

    def sum(self, values_K: Tensor) -> Tensor:
        """Sum over each token's row, at every token of it (K,); differentiable."""
        return self._sums(values_K)[self._index_K].to(values_K.dtype)

    def mean(self, values_K: Tensor) -> Tensor:
        """Mean over each token's row, at every token of it (K,); differentiable."""
        return (self._sums(values_K) / self._count_R)[self._index_K].to(values_K.dtype)

    def any(self, flags_K: Tensor) -> Tensor:
        """True at every token (K,) of a row in which a flag is set anywhere."""
        return (self._sums(flags_K.double()) > 0)[self._index_K]

    def to_go(self, values_K: Tensor) -> Tensor:
        """Sum over each token and those after it in its row (K,)."""
        before_K = values_K.double().cumsum(0) - values_K
        first_R = self._count_R.cumsum(0) - self._count_R
        left_K = before_K - before_K[first_R][self._index_K]
        return (self._sums(values_K)[self._index_K] - left_K).to(values_K.dtype)

    def _sums(self, values_K: Tensor) -> Tensor:
        zeros_R = torch.zeros(len(self._count_R), dtype=torch.float64, device=values_K.device)
        return zeros_R.index_add(0, self._index_K, values_K.double())
