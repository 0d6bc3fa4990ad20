"""The inputs and the result of a policy objective. Shapes: K trained tokens, flat, of whole rows.

    objective(inputs, *, its keys) -> J (K,), or a PolicyTerm where it counts the tokens whose gradient it cut

An objective is a pure function; kinds.py lists the built-in ones. J is to be maximised, token by token, and is differentiable in
``inputs.logprobs_K`` alone. An objective of whole sequences gives every token of a row the row's value. It neither averages over
tokens (aggregate.py) nor weighs them (corrections.py), and no token is withheld from it: a row of which rules left out tokens
comes whole, so that its statistics do not depend on the rules.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from corrente.algo import ratio
from corrente.algo.rows import TrainingRows
from corrente.errors import AlignmentError


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyInputs:
    """The trained tokens of one micro-batch. ``logprobs_K``: of the current policy, differentiable. ``proximal_K``: of the policy
    that the ratio is taken to, a constant. Both are within +-1e4 (``ratio.bounded``)."""

    logprobs_K: Tensor
    proximal_K: Tensor
    advantages_K: Tensor
    rows: TrainingRows

    @property
    def log_ratio_K(self) -> Tensor:
        """log pi - log p of each token, differentiable, held within +-20 so that its exponential is finite."""
        return ratio.log_ratio(self.logprobs_K, self.proximal_K)

    @property
    def unclamped_log_ratio_K(self) -> Tensor:
        """log pi - log p of each token without that bound: for objectives that never take its exponential, and pull towards
        p from any distance. It is at most 2e4, so the square of its sum over a row is finite."""
        return self.logprobs_K - self.proximal_K

    def log_ratio_at(self, level: str) -> Tensor:
        """``log_ratio_K``, or with level "sequence" its mean over each token's row."""
        return ratio.geometric(self.log_ratio_K, self.rows) if level == "sequence" else self.log_ratio_K


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyTerm:
    """J per token, and the tokens whose gradient was cut or shrunk: ratio too low, too high for a good token, any reason."""

    value_K: Tensor
    low_K: Tensor
    high_K: Tensor
    cut_K: Tensor


PolicyFunction = Callable[..., Tensor | PolicyTerm]


def cut(value_K: Tensor, *, low_K: Tensor, high_K: Tensor, other_K: Tensor | None = None) -> PolicyTerm:
    """A value with the tokens a bound has touched."""
    cut_K = low_K | high_K
    return PolicyTerm(value_K=value_K, low_K=low_K, high_K=high_K, cut_K=cut_K if other_K is None else cut_K | other_K)


def as_term(value: Any, *, tokens: int) -> PolicyTerm:
    """The result of an objective, as a term of ``tokens`` tokens; a tensor alone cut none. Raises AlignmentError for
    anything that is not one number per token."""
    if isinstance(value, Tensor):
        none_K = torch.zeros_like(value, dtype=torch.bool)
        value = PolicyTerm(value_K=value, low_K=none_K, high_K=none_K, cut_K=none_K)
    if not isinstance(value, PolicyTerm):
        raise AlignmentError(
            f"algo.objective: it returned {type(value).__name__}; it must return J of every token (K,)"
        )
    for name in ("value_K", "low_K", "high_K", "cut_K"):
        shape = tuple(getattr(value, name).shape)
        if shape != (tokens,):
            raise AlignmentError(
                f"algo.objective: it returned {name} of shape {shape} for {tokens} tokens; it must be (K,)"
            )
    return value
