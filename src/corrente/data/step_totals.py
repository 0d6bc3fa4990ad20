"""Totals over a whole optimizer step, wherever its micro-batches are computed. numpy only.

A rank computes some of a step's micro-batches. Losses and gradients of micro-batches simply add, but some numbers belong to the
step as a whole: denominators (algo/losses.py), means and quantiles of corrections (algo/corrections.py, algo/entropy.py), the
load of experts (learner/balance.py), the report, and the question whether all losses are finite. All of these, and nothing else,
go through ``StepTotals``. The norm of the gradient, and with it clipping and the choice to leave the weights untouched, is a
total too; the optimizer of a backend computes it, because only the backend knows how gradients are laid out (backends/base.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from corrente.data.reductions import Accumulator


class StepTotals(Protocol):
    """Contract.

    - All ranks call the same methods in the same order, with sequences of the same length for ``sum``; each call returns the same
      on every rank. A rank that raised alone would leave the others waiting: what may fail on one rank is agreed on by ``all``.
    - ``sum`` adds each number over the ranks. ``concat`` joins the values (n,) of all ranks, in the order of ranks.
    - ``all`` tells whether ``flag`` is set on every rank. ``merge`` joins what the ranks recorded.
    """

    def sum(self, values: Sequence[float]) -> list[float]: ...

    def concat(self, values: NDArray[np.float64]) -> NDArray[np.float64]: ...

    def all(self, flag: bool) -> bool: ...

    def merge(self, recorded: Accumulator) -> Accumulator: ...


class LocalTotals:
    """Implements StepTotals for a step that one process computes: every method returns its argument."""

    def sum(self, values: Sequence[float]) -> list[float]:
        return list(values)

    def concat(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        return values

    def all(self, flag: bool) -> bool:
        return flag

    def merge(self, recorded: Accumulator) -> Accumulator:
        return recorded


LOCAL_TOTALS = LocalTotals()
