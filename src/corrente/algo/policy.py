"""What every policy objective takes and gives. Shapes: K trained tokens, flat, of whole rows.

An objective is a pure function ``(seen, algo) -> Value`` of one of the files beside this one; objectives.py lists them by name.
Its value J per token is to be maximised, and is differentiable in ``seen.logprobs_K`` alone. An objective of whole sequences
gives every token of a row the row's value; how rows are averaged is not its business (aggregate.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from corrente.algo import ratio
from corrente.algo.rows import TrainingRows
from corrente.config import Algo


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyInputs:
    """``proximal_K`` is a constant, what the ratio is taken to (ratio.py)."""

    logprobs_K: Tensor
    proximal_K: Tensor
    advantages_K: Tensor
    rows: TrainingRows

    @property
    def log_ratio_K(self) -> Tensor:
        """log pi - log p of each token, differentiable, within the bounds of an exponent."""
        return ratio.log_ratio(self.logprobs_K, self.proximal_K)

    @property
    def unclamped_log_ratio_K(self) -> Tensor:
        """The same without bounds: for objectives that never take its exponential, and pull towards p from any distance."""
        return self.logprobs_K - self.proximal_K

    def log_ratio_at(self, level: str) -> Tensor:
        """The same, or its mean over the row with level "sequence"."""
        return ratio.geometric(self.log_ratio_K, self.rows) if level == "sequence" else self.log_ratio_K


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyTerm:
    """J per token, and the tokens whose gradient was cut or shrunk: ratio too low, too high for a good token, any reason."""

    value_K: Tensor
    low_K: Tensor
    high_K: Tensor
    cut_K: Tensor


PolicyFunction = Callable[[PolicyInputs, Algo], PolicyTerm]


def uncut(value_K: Tensor) -> PolicyTerm:
    """A value that no bound has touched."""
    none_K = torch.zeros_like(value_K, dtype=torch.bool)
    return PolicyTerm(value_K=value_K, low_K=none_K, high_K=none_K, cut_K=none_K)


def cut(value_K: Tensor, *, low_K: Tensor, high_K: Tensor, other_K: Tensor | None = None) -> PolicyTerm:
    """A value with the tokens a bound has touched."""
    cut_K = low_K | high_K
    return PolicyTerm(value_K=value_K, low_K=low_K, high_K=high_K, cut_K=cut_K if other_K is None else cut_K | other_K)


def high_of(algo: Algo) -> float:
    """epsilon_high, or epsilon where it is not given."""
    return algo.epsilon if algo.epsilon_high is None else algo.epsilon_high
