"""From finished groups to training rows, and from their log-probabilities to a loss. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from corrente.types import Batch, Group

if TYPE_CHECKING:
    from torch import Tensor


class Algorithm(Protocol):
    """Contract: pure and torch-free.

    - ``trainable`` says whether a scored group carries a learning signal; a reason when not ("" when it does).
    - ``batch`` builds the rows of one step. ``oldest_trainable`` per group withholds tokens of older versions (None: all
      may be trained on). Advantages of a group use the rewards of all its surviving episodes.
    """

    def trainable(self, group: Group) -> str: ...

    def batch(
        self, groups: Sequence[Group], *, step: int, version: int, oldest_trainable: Sequence[int | None]
    ) -> Batch: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """``total``: scalar to differentiate. ``low_K``, ``high_K``, ``cut_K``: tokens whose gradient the objective cut or
    shrank because their ratio was too low, too high for a good token, or for any reason (the first two included)."""

    total: Tensor
    low_K: Tensor
    high_K: Tensor
    cut_K: Tensor


class Objective(Protocol):
    """What the learner minimises. K: the trained tokens of one micro-batch, flat.

    - ``row_weights`` gives, for the rows of a whole optimizer step, the factor of each row's token losses; it contains the
      step's one denominator, so that micro-batches simply add.
    - calling it is pure and differentiable in ``logprobs_K`` alone; ``reference_K`` is given iff ``needs_reference``.
    """

    needs_reference: bool

    def row_weights(self, batch: Batch) -> NDArray[np.float64]: ...

    def __call__(
        self,
        logprobs_K: Tensor,
        *,
        behaviour_K: Tensor,
        advantages_K: Tensor,
        weights_K: Tensor,
        reference_K: Tensor | None = None,
    ) -> Loss: ...
